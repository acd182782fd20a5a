"""Which idle block goes next.

Only leaves can go: published blocks that nobody holds and that have no published child. They wait in a heap,
lowest priority level first, then lowest *rank*, a time in seconds that the policy makes of a block's facts.
When a leaf goes, its parent may become one. Every holder of a block holds its parents too, so sooner or later
all idle blocks can go, tails before heads, and using or freeing a chain of blocks moves one entry.

Entries are not taken out when their block is hit: they are recognised as stale when they come up, because
block and entry no longer agree.

Policies
    lru       time of the last use
    reuse     the default: that, and a bonus for blocks used more than once
    lfu       that, and a half-life for each doubling of the number of uses: frequency with decay
    fifo      time of the storing
    priority  nothing but the priority level; within a level as lru
"""

import numpy as np

from kvcore import index, tree
from kvcore.blocks import CACHED, PRIVATE, Pool
from kvcore.jit import jit

LRU, REUSE, LFU, FIFO = range(4)
POLICIES = {"lru": LRU, "reuse": REUSE, "lfu": LFU, "fifo": FIFO, "priority": LRU}

_BONUS_S = 300.0
_HALF_LIFE_S = 300.0


@jit
def rank(pool: Pool, block: int) -> float:
    """When a block counts as last used: the lowest goes first. It changes only while the block is held."""
    facts, policy = pool.blocks[block], pool.state[0].policy
    if policy == REUSE:
        return facts.used_at + (_BONUS_S if facts.uses > 1 else 0.0)
    if policy == LFU:
        return facts.used_at + _HALF_LIFE_S * np.log2(max(float(facts.uses), 1.0))
    if policy == FIFO:
        return float(facts.stored_at)
    return facts.used_at


@jit
def is_leaf(pool: Pool, block: int) -> bool:
    """Whether a block can go now."""
    facts = pool.blocks[block]
    return facts.state == CACHED and facts.refs == 0 and facts.child < 0


@jit
def _precedes(pool: Pool, one: int, other: int) -> bool:
    a, b = pool.heap[one], pool.heap[other]
    return a.level < b.level or (a.level == b.level and a.rank < b.rank)


@jit
def _swap(pool: Pool, one: int, other: int) -> None:
    a, b = pool.heap[one], pool.heap[other]
    a.rank, b.rank = b.rank, a.rank
    a.block, b.block = b.block, a.block
    a.level, b.level = b.level, a.level


@jit
def _set(pool: Pool, at: int, block: int) -> None:
    pool.heap[at].rank = rank(pool, block)
    pool.heap[at].block = block
    pool.heap[at].level = pool.blocks[block].level


@jit
def _sink(pool: Pool, end: int) -> None:
    """Let the top entry sink to its place among the first `end`."""
    at = 0
    while 2 * at + 1 < end:
        low = 2 * at + 1
        if low + 1 < end and _precedes(pool, low + 1, low):
            low += 1
        if not _precedes(pool, low, at):
            break
        _swap(pool, low, at)
        at = low


@jit
def push(pool: Pool, block: int) -> None:
    """Enter a leaf. The heap has room: see `roomy`."""
    at = pool.state[0].leaves
    pool.state[0].leaves = at + 1
    _set(pool, at, block)
    while at > 0 and _precedes(pool, at, (at - 1) // 2):
        _swap(pool, at, (at - 1) // 2)
        at = (at - 1) // 2


@jit
def _pop(pool: Pool) -> None:
    """Take the top entry out."""
    end = pool.state[0].leaves - 1
    pool.state[0].leaves = end
    _swap(pool, 0, end)
    _sink(pool, end)


@jit
def first(pool: Pool) -> int:
    """The next victim, or -1. Drops stale entries on the way."""
    while pool.state[0].leaves > 0:
        entry = pool.heap[0]
        block = np.int64(entry.block)
        facts = pool.blocks[block]
        if is_leaf(pool, block) and entry.level == facts.level and entry.rank == rank(pool, block):
            return block
        _pop(pool)
    return -1


@jit
def unlink(pool: Pool, block: int) -> None:
    """Make a published block without children invisible; its state is the caller's to set."""
    facts = pool.blocks[block]
    index.remove(pool, block)
    tree.detach(pool, np.int64(facts.parent), block)
    pool.state[0].published -= 1
    leave_space(pool, np.int64(facts.space), 1)


@jit
def leave_space(pool: Pool, space: int, users: int) -> None:
    """A namespace has lost users: after the last one it joins the list of those to be forgotten."""
    pool.spaces[space].users -= users
    if pool.spaces[space].users == 0:
        pool.spaces[space].next_unused = pool.state[0].unused_space
        pool.state[0].unused_space = space


@jit
def evict(pool: Pool, now: float) -> int:
    """Make room: the next victim becomes PRIVATE with one holder. There must be an idle block."""
    victim, state = first(pool), pool.state[0]
    facts = pool.blocks[victim]
    parent = np.int64(facts.parent)
    unlink(pool, victim)
    state.idle -= 1
    state.evictions += 1
    state.idle_s += now - facts.used_at
    state.lifetime_s += now - state.started_at - facts.stored_at
    ghost = pool.ghosts[facts.hash % np.uint64(pool.ghosts.shape[0])]
    ghost.tag = facts.hash >> np.uint64(32)
    ghost.evicted_at = now - state.started_at
    if parent >= 0 and is_leaf(pool, parent):
        _set(pool, 0, parent)  # most often as old as its child, so that it stays on top
        _sink(pool, state.leaves)
    else:
        _pop(pool)
    facts.state = PRIVATE
    facts.refs = 1
    return victim


@jit
def refill(pool: Pool) -> None:
    """Build the heap anew from the leaves there are."""
    pool.state[0].leaves = 0
    for block in range(pool.blocks.shape[0]):
        if is_leaf(pool, block):
            push(pool, block)


@jit
def count_leaves(pool: Pool) -> int:
    """How many blocks can go at once."""
    count = 0
    for block in range(pool.blocks.shape[0]):
        count += is_leaf(pool, block)
    return count


def roomy(pool: Pool, pushes: int) -> Pool:
    """The pool with room in its heap for `pushes` more: stale entries are dropped, or the heap grows."""
    if int(pool.state["leaves"][0]) + pushes <= len(pool.heap):
        return pool
    need = 2 * (count_leaves(pool) + pushes) + 64
    if need > len(pool.heap):
        pool = pool._replace(heap=np.zeros(need + need // 2, pool.heap.dtype))
    refill(pool)
    return pool
