"""How long to keep what: priority levels for ranges of a prompt's tokens, some of them for a time only.

Every published block has a level from 0 to 100; the blocks of a lower level are evicted before any of a
higher one. A block takes the level of the range in which its first token lies; without one it has the default
of 35. Whoever states a level last for a block decides, whether it stored the block or hit it.
"""

import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvcore.arrays import BlockIds
from kvcore.blocks import CACHED, DEFAULT_LEVEL, Pool
from kvcore.errors import InvalidRequest
from kvcore.eviction import push_leaves, roomy


@dataclass(frozen=True)
class Retention:
    """Tokens start <= i < end (None: to the end of the sequence) have priority `level`, for `duration_s`.

    `level` is 0..100, higher is kept longer. The duration in seconds (None: for ever) counts from when a
    block is stored or hit; after it the block has the default level again. Raises `InvalidRequest` for a
    reversed or empty range or a value of a wrong type or out of range.
    """

    start: int
    end: int | None
    level: int
    duration_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("end", self.end), ("level", self.level)):
            if not isinstance(value, int | np.integer) and not (name == "end" and value is None):
                raise InvalidRequest(f"retention {name} must be an integer, not {value!r}")
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise InvalidRequest(f"retention range {self.start}..{self.end} is empty, reversed or negative")
        if not 0 <= self.level <= 100:
            raise InvalidRequest(f"retention level must be 0..100, not {self.level}")
        numeric = isinstance(self.duration_s, int | float | np.integer | np.floating)
        if self.duration_s is not None and not (numeric and 0 < self.duration_s <= sys.float_info.max):
            raise InvalidRequest(
                f"retention duration must be a positive number of s, not {self.duration_s!r}"
            )


def in_order(ranges: Sequence[Retention]) -> tuple[Retention, ...]:
    """The ranges by their start. Raises `InvalidRequest` when two overlap."""
    ordered = tuple(sorted(ranges, key=lambda part: part.start))
    for one, other in pairwise(ordered):
        if one.end is None or one.end > other.start:
            raise InvalidRequest(f"retention ranges overlap at token {other.start}")
    return ordered


class Retentions:
    """Sets levels, and takes them back when their time is over."""

    def __init__(self) -> None:
        self._line: list[tuple[float, int]] = []  # (deadline, block), earliest first
        self._deadlines: dict[int, tuple[float, int]] = {}  # block: (deadline, hash of its content)

    def apply(self, pool: Pool, table: BlockIds, place: int, ranges: Sequence[Retention], now: float) -> None:
        """Set the levels of held blocks: `table` is the part of a block table that begins at `place`."""
        size = pool.tokens.shape[1]
        for part in ranges:
            first = -(-part.start // size)
            end = len(table) + place if part.end is None else -(-part.end // size)
            ids = table[max(first - place, 0) : max(end - place, 0)]
            pool.blocks["level"][ids] = part.level
            for block in ids.tolist():
                self._set_deadline(pool, block, None if part.duration_s is None else now + part.duration_s)

    def expire(self, pool: Pool, now: float) -> Pool:
        """Give blocks whose time is over the default level; returns the pool, maybe with larger heaps."""
        due: dict[int, int] = {}  # block: hash of the content that the time was meant for
        while self._line and self._line[0][0] <= now:
            deadline, block = heapq.heappop(self._line)
            if self._deadlines.get(block, (None, 0))[0] == deadline:  # no other was set since
                due[block] = self._deadlines.pop(block)[1]
        if not due:
            return pool
        blocks, keys = np.array(list(due), np.int32), np.array(list(due.values()), np.uint64)
        facts = pool.blocks[blocks]
        blocks = blocks[(facts["state"] == CACHED) & (facts["hash"] == keys)]
        pool.blocks["level"][blocks] = DEFAULT_LEVEL
        pool = roomy(pool, len(blocks))
        push_leaves(pool, blocks)
        return pool

    def _set_deadline(self, pool: Pool, block: int, deadline: float | None) -> None:
        if deadline is None:
            self._deadlines.pop(block, None)
            return
        self._deadlines[block] = (deadline, int(pool.blocks["hash"][block]))
        heapq.heappush(self._line, (deadline, block))
        if len(self._line) > 2 * len(self._deadlines) + 64:  # mostly entries that a later one has replaced
            self._line = sorted((deadline, block) for block, (deadline, _) in self._deadlines.items())
