"""Prompts on their way: an exact overlay over the fingerprints, for requests placed but not yet stored.

Each entry keeps the prefix hashes of one placed prompt. A hash covers its whole prefix, so two prompts share
at least d blocks exactly if their d-th hashes agree: one comparison tells whether an entry leads deeper than
what is known of its replica, and only then it is searched how much deeper.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvcore.arrays import plain
from kvcore.jit import jit

_MIN_ENTRIES = 64
_MIN_POOL = 4096

Hashes = npt.NDArray[np.uint64]
Depths = npt.NDArray[np.int64]


class Entry:
    """One prompt in flight. `row` is owned by the overlay, -1 once removed."""

    __slots__ = ("epoch", "row", "seq")

    def __init__(self, row: int) -> None:
        self.row = row
        self.epoch: int | None = None  # of the start chunk, once the prompt is stored
        self.seq = 0


class InFlight:
    """Hashes of the prompts in flight, by replica slot. Memory is within a factor of the live hashes."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._slots = np.zeros(_MIN_ENTRIES, dtype=np.int64)
        self._starts = np.zeros(_MIN_ENTRIES, dtype=np.int64)
        self._lengths = np.zeros(_MIN_ENTRIES, dtype=np.int64)
        self._pool: Hashes = np.zeros(_MIN_POOL, dtype=np.uint64)
        self._tail = 0  # the pool is filled up to here, with holes where entries left
        self._live = 0  # hashes of live entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def slot(self, entry: Entry) -> int:
        """The slot of a live entry."""
        return int(self._slots[entry.row])

    def hashes(self, entry: Entry) -> Hashes:
        """The hashes of a live entry, uint64[n], a copy."""
        start = self._starts[entry.row]
        return self._pool[start : start + self._lengths[entry.row]].copy()

    def add(self, slot: int, hashes: Hashes) -> Entry:
        """Note that the prompt with these hashes, uint64[n], is on its way to the replica at `slot`."""
        row = len(self._entries)
        if row == len(self._slots):
            self._slots, self._starts, self._lengths = (
                np.concatenate([a, np.zeros_like(a)]) for a in (self._slots, self._starts, self._lengths)
            )
        start = self._room(len(hashes))
        self._pool[start : start + len(hashes)] = hashes
        self._slots[row], self._starts[row], self._lengths[row] = slot, start, len(hashes)
        self._tail = start + len(hashes)
        self._live += len(hashes)
        entry = Entry(row)
        self._entries.append(entry)
        return entry

    def move(self, entry: Entry, slot: int) -> None:
        """The prompt of a live entry went to another replica."""
        if entry.row >= 0:
            self._slots[entry.row] = slot

    def remove(self, entry: Entry) -> None:
        """Forget an entry; one already removed is ignored."""
        row = entry.row
        if row < 0:
            return
        self._live -= int(self._lengths[row])
        last = self._entries.pop()
        if last is not entry:  # the last row fills the hole
            for array in (self._slots, self._starts, self._lengths):
                array[row] = array[last.row]
            self._entries[row] = last
            last.row = row
        entry.row = -1
        if not self._entries:
            self._tail = 0

    def deepen(self, hashes: Hashes, depth: Depths) -> bool:
        """Raise `depth` (int64[capacity], blocks by slot, in place) where a prompt in flight shares more.

        Returns whether anything was raised.
        """
        count = len(self._entries)
        return min(count, len(hashes)) > 0 and _deepen(
            self._slots[:count], self._starts, self._lengths, self._pool, plain(hashes), depth
        )

    def _room(self, length: int) -> int:
        """Where `length` hashes fit; closes the holes, or grows the pool, when its end is reached."""
        if self._tail + length <= len(self._pool):
            return self._tail
        size = len(self._pool)
        while size < 2 * (self._live + length):
            size *= 2
        pool = np.zeros(size, dtype=np.uint64)
        tail = 0
        for row in range(len(self._entries)):
            start, count = int(self._starts[row]), int(self._lengths[row])
            pool[tail : tail + count] = self._pool[start : start + count]
            self._starts[row] = tail
            tail += count
        self._pool, self._tail = pool, tail
        return tail


@jit
def _deepen(
    slots: Depths, starts: Depths, lengths: Depths, pool: Hashes, hashes: Hashes, depth: Depths
) -> bool:
    raised = False
    for row in range(len(slots)):
        known, end = depth[slots[row]], min(lengths[row], len(hashes))
        if known >= end or pool[starts[row] + known] != hashes[known]:
            continue
        low, high = known + 1, end  # it shares at least `low` blocks, at most `high`
        while low < high:
            middle = (low + high + 1) // 2
            if pool[starts[row] + middle - 1] == hashes[middle - 1]:
                low = middle
            else:
                high = middle - 1
        depth[slots[row]], raised = low, True
    return raised
