"""The Bloom filter behind a fingerprint: its geometry, its digest, and the counting form a replica keeps.

A router keeps one bit per row and replica; the replica keeps counters, because only counters can forget
(Fan, Cao, Almeida, Broder: Summary Cache, SIGCOMM 1998). A prefix cache is prefix-closed, so a false positive
lengthens a predicted hit by a geometric tail only, and 8 to 16 bits a block with 4 hashes are plenty.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvcore.arrays import Hashes, Rows, plain
from kvcore.errors import InvalidRequest
from kvcore.events import BlocksRemoved, BlocksStored, Cleared, Event
from kvcore.hashing import mix
from kvcore.jit import jit

_MASK64 = (1 << 64) - 1
_LOW32 = np.uint64(0xFFFFFFFF)
Counts = npt.NDArray[np.uint16]
_MOST = 65_535


@dataclass(frozen=True)
class FilterGeometry:
    """Number of rows (a power of two from 8 to 2^31) and of hashes per key (1 to 16)."""

    rows: int
    hashes: int = 4

    def __post_init__(self) -> None:
        if not 8 <= self.rows <= 1 << 31 or self.rows & (self.rows - 1):
            raise InvalidRequest(f"filter rows must be a power of two from 8 to 2^31, not {self.rows}")
        if not 1 <= self.hashes <= 16:
            raise InvalidRequest(f"filter hashes must be 1..16, not {self.hashes}")

    @classmethod
    def for_blocks(cls, num_blocks: int) -> "FilterGeometry":
        """The geometry for a cache of `num_blocks` blocks: at least 8 and less than 16 rows a block."""
        if num_blocks < 1:
            raise InvalidRequest(f"num_blocks must be at least 1, not {num_blocks}")
        return cls(rows=1 << (8 * num_blocks - 1).bit_length())

    def rows_of(self, hashes: Hashes) -> Rows:
        """Rows of each key: uint64[n] -> int64[n, K], row k = (lo32 + k * (hi32 | 1)) mod rows.

        Double hashing as in Kirsch and Mitzenmacher, ESA 2006. Rows for a smaller power of two are these rows
        modulo it, so one computation serves filters of several sizes.
        """
        low = (hashes & _LOW32).astype(np.int64)
        high = (hashes >> np.uint64(32)).astype(np.int64) | 1
        rows = np.multiply.outer(high, np.arange(self.hashes, dtype=np.int64))
        rows += low[:, None]
        rows &= self.rows - 1
        return rows


def column_digest(rows: npt.NDArray[np.integer]) -> int:
    """Digest of a set of distinct rows: the sum of splitmix64's finalizer over them, modulo 2^64.

    A sum, so that both sides update it from row flips alone, in any order.
    """
    return int(_mixed_sum(np.asarray(rows).astype(np.uint64))) if len(rows) else 0


def odd_rows(rows: Rows) -> Rows:
    """The rows that occur an odd number of times, ascending: the net effect of flips."""
    rows = np.sort(rows)
    edges = np.flatnonzero(rows[1:] != rows[:-1])
    ends = np.append(edges, len(rows) - 1)  # of runs of one and the same row
    return rows[ends[(ends - np.append(-1, edges)) % 2 == 1]]


class CountingFilter:
    """How many resident keys touch each row. `add`, `remove` and `clear` return the rows that flipped."""

    def __init__(self, geometry: FilterGeometry) -> None:
        self.geometry = geometry
        self.digest = 0  # column_digest of the set rows, kept up to date from flips
        self._counts = np.zeros(geometry.rows, dtype=np.uint16)

    def bits_at(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """The bits of rows int64[...], in their shape: true where at least one key touches the row."""
        return self._counts[rows] > 0

    @property
    def set_rows(self) -> Rows:
        """int64[m], ascending: the rows whose bit is set."""
        return np.flatnonzero(self._counts)

    def add(self, hashes: Hashes) -> Rows:
        """Count keys uint64[n] in; returns the rows that became set.

        Raises `InvalidRequest`, with nothing changed, if a counter would overflow (a key added 65,535 times).
        """
        return self._count(hashes, 1, "a filter counter would overflow: keys must be added once")

    def remove(self, hashes: Hashes) -> Rows:
        """Count keys uint64[n] out; returns the rows that became clear.

        Raises `InvalidRequest`, with nothing changed, if a key was certainly never added.
        """
        return self._count(hashes, -1, "a key was removed that is not in the filter")

    def follow(self, events: Sequence[Event]) -> Rows:
        """Apply a cache's events, oldest first; returns the rows that flipped in the end, ascending."""
        flips = [np.empty(0, dtype=np.int64)]
        for clears, run in groupby(events, lambda event: isinstance(event, Cleared)):
            if clears:
                flips.append(self.clear())
                continue
            part = list(run)
            # Counting everything in before anything out gives the same counts in two calls instead of many.
            for kind, count in ((BlocksStored, self.add), (BlocksRemoved, self.remove)):
                hashes = [event.hashes for event in part if isinstance(event, kind)]
                flips += [count(np.concatenate(hashes))] if hashes else []
        return flips[-1] if len(flips) <= 2 else odd_rows(np.concatenate(flips))

    def clear(self) -> Rows:
        """Forget every key; returns the rows that were set."""
        flipped = self.set_rows
        self._counts[:] = 0
        self.digest = 0
        return flipped

    def _count(self, hashes: Hashes, step: int, refusal: str) -> Rows:
        flipped = np.empty(len(hashes) * self.geometry.hashes, dtype=np.int64)
        found, digest = _count(self._counts, plain(hashes), self.geometry.hashes, step, flipped)
        if found < 0:
            raise InvalidRequest(refusal)
        flipped = flipped[:found]
        flipped.sort()
        # Either all flips of one call set rows or all clear them, so one sign holds for the whole change.
        self.digest = (self.digest + step * int(digest)) & _MASK64
        return flipped


@jit
def _count(counts: Counts, hashes: Hashes, per_hash: int, step: int, flipped: Rows) -> tuple[int, np.uint64]:
    """Add `step`, 1 or -1, to the counters of all rows of all keys, and say which became 1 or 0; returns how
    many did, and their digest; or -1, with nothing changed, when a counter would leave its range."""
    mask, edge, found, digest = np.uint64(len(counts) - 1), 1 if step > 0 else 0, 0, np.uint64(0)
    for place in range(len(hashes) * per_hash):
        row = row_of(hashes[place // per_hash], place % per_hash, mask)
        new = np.int64(counts[row]) + step
        if new < 0 or new > _MOST:
            for done in range(place):
                counts[row_of(hashes[done // per_hash], done % per_hash, mask)] -= np.uint16(step)
            return -1, digest
        counts[row] = new
        if new == edge:
            flipped[found] = row
            found += 1
            digest += mix(np.uint64(row))
    return found, digest


@jit
def _mixed_sum(rows: Hashes) -> np.uint64:
    total = np.uint64(0)
    for row in rows:
        total += mix(row)
    return total


@jit
def row_of(value: np.uint64, number: int, mask: np.uint64) -> np.int64:
    """`FilterGeometry.rows_of`, one row of one key."""
    step = (value >> np.uint64(32)) | np.uint64(1)
    return np.int64((value + np.uint64(number) * step) & mask)
