"""Which idle block goes next.

Only leaves can go: published blocks that nobody holds and that have no published child. They wait in heaps,
lowest priority level first, then lowest *rank*, a time in seconds that the policy makes of a block's facts.
When a leaf goes, its parent may become one. Every holder of a block holds its parents too, so sooner or later
all idle blocks can go, tails before heads, and using or freeing a chain of blocks moves one entry.

Entries are not taken out when their block is hit: they are recognised as stale when they come up, because
block and entry no longer agree.

Policies
    lru       time of the last use
    reuse     the default: that, and a bonus by class, learnt from the traffic (see `kvcore.habits`). Bonuses
              change all the time, so each class has a heap of its own and the best of the heads goes
    lfu       that, and a half-life for each doubling of the number of uses: frequency with decay
    fifo      time of the storing
    priority  another name of lru: priority levels count in every policy
"""

from typing import Any

import numpy as np

from kvcore import habits, index, tree
from kvcore.arrays import BlockIds
from kvcore.blocks import CACHED, CLASSES, PRIVATE, Pool
from kvcore.jit import jit

LRU, REUSE, LFU, FIFO = range(4)
POLICIES = {"lru": LRU, "reuse": REUSE, "lfu": LFU, "fifo": FIFO, "priority": LRU}

_HALF_LIFE_S = 300.0


@jit
def rank(pool: Pool, block: int) -> float:
    """When a block counts as last used, before any bonus. It changes only while the block is held."""
    facts = pool.blocks[block]
    if pool.state[0].policy == LFU:
        return facts.used_at + _HALF_LIFE_S * np.log2(max(float(facts.uses), 1.0))
    return facts.used_at


@jit
def heap_of(pool: Pool, block: int) -> int:
    """The heap that a block waits in: its class for the reuse-aware policy, the only one for others."""
    return habits.class_of(pool.blocks[block].uses) if pool.state[0].policy == REUSE else 0


@jit
def is_leaf(pool: Pool, block: int) -> bool:
    """Whether a block can go now."""
    facts = pool.blocks[block]
    return facts.state == CACHED and facts.refs == 0 and facts.child < 0


@jit
def idle(pool: Pool, block: int, now: float) -> None:
    """The last holder of a published block has left."""
    if pool.state[0].policy != FIFO:
        pool.blocks[block].used_at = now
    if pool.blocks[block].child < 0:
        push(pool, block)


@jit
def _precedes(a: Any, b: Any) -> bool:
    return a.level < b.level or (a.level == b.level and a.rank < b.rank)


@jit
def _swap(a: Any, b: Any) -> None:
    a.rank, b.rank = b.rank, a.rank
    a.block, b.block = b.block, a.block
    a.level, b.level = b.level, a.level


@jit
def _set(pool: Pool, heap: int, at: int, block: int) -> None:
    entry = pool.heaps[heap, at]
    entry.rank = rank(pool, block)
    entry.block = block
    entry.level = pool.blocks[block].level


@jit
def _sink(pool: Pool, heap: int) -> None:
    """Let the top entry of a heap sink to its place."""
    entries, end, at = pool.heaps[heap], pool.habits[heap].leaves, 0
    while 2 * at + 1 < end:
        low = 2 * at + 1
        if low + 1 < end and _precedes(entries[low + 1], entries[low]):
            low += 1
        if not _precedes(entries[low], entries[at]):
            break
        _swap(entries[low], entries[at])
        at = low


@jit
def push(pool: Pool, block: int) -> None:
    """Enter a leaf. Its heap has room: see `roomy`."""
    heap = heap_of(pool, block)
    entries, at = pool.heaps[heap], pool.habits[heap].leaves
    pool.habits[heap].leaves = at + 1
    _set(pool, heap, at, block)
    while at > 0 and _precedes(entries[at], entries[(at - 1) // 2]):
        _swap(entries[at], entries[(at - 1) // 2])
        at = (at - 1) // 2


@jit
def push_leaves(pool: Pool, table: BlockIds) -> None:
    """Enter those of a table that are leaves, each one's level being what it is now."""
    for i in range(len(table)):
        if is_leaf(pool, np.int64(table[i])):
            push(pool, np.int64(table[i]))


@jit
def _pop(pool: Pool, heap: int) -> None:
    """Take the top entry out."""
    end = pool.habits[heap].leaves - 1
    pool.habits[heap].leaves = end
    _swap(pool.heaps[heap, 0], pool.heaps[heap, end])
    _sink(pool, heap)


@jit
def _top(pool: Pool, heap: int) -> int:
    """The first block of a heap, or -1. Drops stale entries on the way."""
    while pool.habits[heap].leaves > 0:
        entry = pool.heaps[heap, 0]
        block = np.int64(entry.block)
        facts = pool.blocks[block]
        if is_leaf(pool, block) and entry.level == facts.level and entry.rank == rank(pool, block):
            return block
        _pop(pool, heap)
    return -1


@jit
def first(pool: Pool) -> int:
    """The next victim, or -1."""
    best, best_level, best_rank = -1, 101, np.inf
    for heap in range(CLASSES):
        block = _top(pool, heap)
        if block >= 0:
            level, when = np.int64(pool.blocks[block].level), rank(pool, block) + pool.habits[heap].bonus
            if level < best_level or (level == best_level and when < best_rank):
                best, best_level, best_rank = block, level, when
    return best


@jit
def idle_s(pool: Pool, now: float) -> float:
    """How long the next victim has been idle, in seconds; -1 if there is none."""
    victim = first(pool)
    return max(now - pool.blocks[victim].used_at, 0.0) if victim >= 0 else -1.0


@jit
def unlink(pool: Pool, block: int, now: float) -> None:
    """Make a published block without children invisible; its state is the caller's to set."""
    facts = pool.blocks[block]
    index.remove(pool, block)
    tree.detach(pool, np.int64(facts.parent), block)
    count_published(pool, -1, now)
    if facts.parent < 0:
        leave_space(pool, -1 - np.int64(facts.parent))


@jit
def count_published(pool: Pool, change: int, now: float) -> None:
    """More or fewer blocks are published from now on."""
    state = pool.state[0]
    state.block_seconds += state.published * (now - state.published_at)
    state.published_at = now
    state.published += change


@jit
def leave_space(pool: Pool, space: int) -> None:
    """A namespace has a user less: after the last one it joins the list of those to be forgotten."""
    pool.spaces[space].users -= 1
    if pool.spaces[space].users == 0:
        pool.spaces[space].next_unused = pool.state[0].unused_space
        pool.state[0].unused_space = space


@jit
def evict(pool: Pool, now: float) -> int:
    """Make room: the next victim becomes PRIVATE with one holder. There must be an idle block."""
    victim, state = first(pool), pool.state[0]
    facts, heap = pool.blocks[victim], heap_of(pool, victim)
    parent = np.int64(facts.parent)
    unlink(pool, victim, now)
    state.idle -= 1
    state.evictions += 1
    state.idle_s += now - facts.used_at
    habits.end(pool, victim, now)
    if parent >= 0 and is_leaf(pool, parent) and heap_of(pool, parent) == heap:
        _set(pool, heap, 0, parent)  # most often as old as its child, so that it stays on top
        _sink(pool, heap)
    else:
        _pop(pool, heap)
        if parent >= 0 and is_leaf(pool, parent):
            push(pool, parent)
    facts.state = PRIVATE
    facts.refs = 1
    return victim


@jit
def refill(pool: Pool) -> None:
    """Build the heaps anew from the leaves there are."""
    for heap in range(CLASSES):
        pool.habits[heap].leaves = 0
    for block in range(len(pool.blocks)):
        if is_leaf(pool, block):
            push(pool, block)


def roomy(pool: Pool, pushes: int) -> Pool:
    """The pool with room in its heaps for `pushes` more: stale entries are dropped, or the heaps grow."""
    capacity = pool.heaps.shape[1]
    if max(pool.habits["leaves"].tolist()) + pushes <= capacity:
        return pool
    facts = pool.blocks
    leaves = np.count_nonzero((facts["state"] == CACHED) & (facts["refs"] == 0) & (facts["child"] < 0))
    need = 2 * (leaves + pushes) + 64
    if need > capacity:
        pool = pool._replace(heaps=np.zeros((CLASSES, need + need // 2), pool.heaps.dtype))
    refill(pool)
    return pool
