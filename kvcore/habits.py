"""How likely a block is to be used again: what the reuse-aware policy learns while it runs.

Blocks are of three classes: used once, twice, more often. Per class, P is the share of uses that another one
followed; over all, tau is the typical time between two uses, longer times weighing more. The chance that a
block is used again after an idle time t is then about P * exp(-t / tau), and comparing its logarithm means
comparing `last use + tau * ln P`. So a class has a bonus in seconds, at most 0, which measures nothing but
the traffic itself: no setting, no absolute time. Where all classes are used alike, or the pool is so large
that victims are much older than tau, the order is that of least recent use.

Ghosts remember blocks that were evicted lately: one that returns is not new, and its return counts as a use.
"""

import numpy as np

from kvcore.blocks import CLASSES, Pool
from kvcore.jit import jit

MOST_USES = 65_535


@jit
def use(pool: Pool, block: int, gap_s: float) -> None:
    """Count another use of a block after so many idle seconds; 0 if it was not idle."""
    facts = pool.blocks[block]
    pool.habits[class_of(facts.uses)].again += 1
    if facts.uses < MOST_USES:
        facts.uses += 1
    pool.habits[class_of(facts.uses)].uses += 1
    _see_gap(pool, gap_s)


@jit
def class_of(uses: int) -> int:
    """0 for a block used once, 1 twice, 2 more often."""
    return min(max(np.int64(uses), 1), CLASSES) - 1


@jit
def _see_gap(pool: Pool, gap_s: float) -> None:
    pool.state[0].gap_s += gap_s
    pool.state[0].gap_s2 += gap_s * gap_s


@jit
def begin(pool: Pool, block: int, now: float) -> None:
    """Count the first use of a block that has just been stored, or its return if there is a ghost of it."""
    facts, uses = pool.blocks[block], 1
    bucket, way = _find_ghost(pool, facts.hash)
    if way >= 0:
        ghost = pool.ghosts[bucket, way]
        before = np.int64(ghost.tag & np.uint32(3))
        pool.habits[class_of(before)].again += 1
        _see_gap(pool, now - _evicted_at(pool, ghost.evicted_at) + pool.state[0].age_s)
        ghost.tag = 0
        uses = before + 1
    facts.uses = uses
    pool.habits[class_of(uses)].uses += 1


@jit
def end(pool: Pool, block: int, now: float) -> None:
    """A block is evicted: leave a ghost, in place of the oldest one of its bucket."""
    facts, state = pool.blocks[block], pool.state[0]
    state.age_s += (now - facts.used_at - state.age_s) * min(8 / len(pool.blocks), 1.0)
    bucket = np.int64(facts.hash % np.uint64(pool.ghosts.shape[0]))
    oldest = 0
    for way in range(4):
        ghost = pool.ghosts[bucket, way]
        if ghost.tag == 0:
            oldest = way
            break
        if abs(ghost.evicted_at) < abs(pool.ghosts[bucket, oldest].evicted_at):
            oldest = way
    ghost = pool.ghosts[bucket, oldest]
    ghost.tag = _tag(facts.hash) | np.uint32(class_of(facts.uses) + 1)
    ghost.evicted_at = now - state.started_at


@jit
def _tag(key: np.uint64) -> np.uint32:
    """30 bits of a hash; the 2 low ones are for the number of uses, which makes a tag of 0 an empty place."""
    return np.uint32(key >> np.uint64(32)) & ~np.uint32(3)


@jit
def _evicted_at(pool: Pool, stored: float) -> float:
    return pool.state[0].started_at + abs(stored)


@jit
def _find_ghost(pool: Pool, key: np.uint64) -> tuple[int, int]:
    """Bucket and place of the ghost of a hash; place -1 if there is none."""
    bucket = np.int64(key % np.uint64(pool.ghosts.shape[0]))
    for way in range(4):
        tag = pool.ghosts[bucket, way].tag
        if tag != 0 and tag & ~np.uint32(3) == _tag(key):
            return bucket, way
    return bucket, -1


@jit
def evicted_at(pool: Pool, key: np.uint64) -> float:
    """When a block with this hash was evicted, on the cache's clock; -1 if that is not remembered."""
    bucket, way = _find_ghost(pool, key)
    return _evicted_at(pool, pool.ghosts[bucket, way].evicted_at) if way >= 0 else -1.0


@jit
def regret(pool: Pool, key: np.uint64, now: float) -> None:
    """A hash is asked for that is not there: if it was evicted, count that, once for each eviction."""
    bucket, way = _find_ghost(pool, key)
    if way >= 0 and pool.ghosts[bucket, way].evicted_at > 0:
        ghost = pool.ghosts[bucket, way]
        pool.state[0].regrets += 1
        pool.state[0].regret_s += now - _evicted_at(pool, ghost.evicted_at)
        ghost.evicted_at = -ghost.evicted_at


@jit
def learn(pool: Pool) -> None:
    """Compute the bonuses from the counts; halve those now and then, so that old habits fade."""
    state, habits, blocks = pool.state[0], pool.habits, len(pool.blocks)
    uses = again = 0.0
    for c in range(CLASSES):
        uses += habits[c].uses
        again += habits[c].again
    if state.gap_s > 0:
        tau = state.gap_s2 / state.gap_s
        scale = min(1.0, tau / state.age_s) if state.age_s > 0 else 1.0
        prior, best = blocks / 16, -np.inf
        for c in range(CLASSES):
            share = (habits[c].again + prior * again / uses) / (habits[c].uses + prior)
            best = max(best, scale * tau * np.log(min(share, 1.0)))
            habits[c].bonus = best
    if uses > 16 * blocks:
        state.gap_s /= 2
        state.gap_s2 /= 2
        for c in range(CLASSES):
            habits[c].uses /= 2
            habits[c].again /= 2
