"""What caches of every size would hit on a trace, in one pass.

The stack distance of a use (Mattson et al., IBM Systems Journal 1970) is how many distinct blocks were used
since the block's last use, itself included: an LRU cache of at least so many blocks has it. A prompt uses its
tail first and its head last, as prefix caches evict tails before heads, so within a prompt distances grow
with depth, and one number a block says at which sizes the prompt is a hit down to it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.jit import jit
from router.lab.uses import Uses

_POWERS = 40


@dataclass(frozen=True)
class Reuse:
    """Hits in tokens of one cache for all, int64[r] each, and how far apart uses are.

    `ideal` is of a cache that never forgets, `within` of one for each session (0 without sessions); `lru`
    int64[r, c] of LRU caches of c sizes. `distances` int64[40] counts reuses: at k those of a stack distance
    up to 2^k blocks and above 2^(k-1).
    """

    ideal: NDArray[np.int64]
    within: NDArray[np.int64]
    lru: NDArray[np.int64]
    distances: NDArray[np.int64]

    @classmethod
    def of(cls, uses: Uses, capacities: NDArray[np.int64]) -> "Reuse":
        """For LRU caches of `capacities` blocks, int64[c]. Answers are not counted."""
        requests = len(uses.lengths)
        depths = np.zeros((requests, len(capacities) + 1), np.int64)
        distances = np.zeros(_POWERS, np.int64)
        positions = 1 << int(2 * uses.distinct + _longest(uses)).bit_length()
        limits = np.append(capacities, np.iinfo(np.int64).max)
        _stack_distances(
            uses.blocks,
            uses.begins,
            limits,
            np.full(uses.distinct, -1, np.int64),
            np.full(positions, -1, np.int64),
            np.zeros(positions + 1, np.int64),
            depths,
            distances,
        )
        within = np.zeros(requests, np.int64)
        order = np.argsort(uses.sessions, kind="stable")
        _within(uses.blocks, uses.begins, uses.sessions, order, np.full(uses.distinct, -1, np.int64), within)
        tokens = np.minimum(depths * uses.size, uses.lengths[:, None] - 1)
        inner = np.minimum(within * uses.size, uses.lengths - 1)
        return cls(tokens[:, -1], inner, tokens[:, :-1], distances)


def _longest(uses: Uses) -> int:
    return int(np.diff(uses.begins).max())


@jit
def _within(blocks: Any, begins: Any, sessions: Any, order: Any, owner: Any, depths: Any) -> None:
    """Leading blocks of each request that its session has used before; `owner` int64[d] is -1 at first."""
    for request in order:
        session = sessions[request]
        if session < 0:
            continue
        leading = True
        for use in range(begins[request], begins[request + 1]):
            leading = leading and owner[blocks[use]] == session
            depths[request] += leading
        for use in range(begins[request], begins[request + 1]):
            owner[blocks[use]] = session


@jit
def _stack_distances(
    blocks: Any, begins: Any, limits: Any, last: Any, held: Any, tree: Any, depths: Any, distances: Any
) -> None:
    """For each request, its leading blocks whose distance is within each of `limits`: depths[r, c].

    `last` is the position of each block's last use, -1 at first; `held` the block whose last use a position
    is; `tree` (Fenwick, 1994) counts the positions that are somebody's last use. Positions run out now and
    then: they are dealt anew, in the same order.
    """
    now = 0
    used = 0  # distinct blocks so far
    for request in range(len(begins) - 1):
        begin, end = begins[request], begins[request + 1]
        if now + end - begin > len(held):
            now = _deal_anew(last, held, tree, now)
        for use in range(begin, end):
            at = last[blocks[use]]
            if at < 0:
                break  # the blocks behind an unknown one are unknown
            distance = used - _count_up_to(tree, at + 1) + 1
            for c in range(len(limits)):
                depths[request, c] += distance <= limits[c]
            power = 0
            while (1 << power) < distance:
                power += 1
            distances[power] += 1
        for use in range(end - 1, begin - 1, -1):
            block = blocks[use]
            if last[block] >= 0:
                held[last[block]] = -1
                _add(tree, last[block] + 1, -1)
            else:
                used += 1
            last[block] = now
            held[now] = block
            _add(tree, now + 1, 1)
            now += 1


@jit
def _deal_anew(last: Any, held: Any, tree: Any, now: int) -> int:
    kept = 0
    for at in range(now):
        block = held[at]
        if block >= 0:
            held[kept] = block
            last[block] = kept
            kept += 1
    held[kept:] = -1
    for node in range(1, len(tree)):
        tree[node] = 0
    for node in range(1, len(tree)):
        tree[node] += node <= kept
        above = node + (node & -node)
        if above < len(tree):
            tree[above] += tree[node]
    return kept


@jit
def _count_up_to(tree: Any, node: int) -> int:
    total = 0
    while node > 0:
        total += tree[node]
        node -= node & -node
    return total


@jit
def _add(tree: Any, node: int, change: int) -> None:
    while node < len(tree):
        tree[node] += change
        node += node & -node
