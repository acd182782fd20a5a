"""Who holds which block: the steps of a sequence's life, each one compiled call over its block table.

A table is int32[k], block ids in the order of the tokens. Nothing here fails: the cache has made sure of
blocks to take and of room in the heap.
"""

import numpy as np

from kvcore import eviction, habits, index, tree
from kvcore.arrays import BlockIds, Hashes, Tokens
from kvcore.blocks import CACHED, DEAD, DEFAULT_LEVEL, PRIVATE, Pool, give_free, take_free
from kvcore.jit import jit
from kvcore.match import find, is_block_of


@jit
def pin(pool: Pool, block: int) -> None:
    """One holder more."""
    facts = pool.blocks[block]
    if facts.refs == 0:
        pool.state[0].idle -= 1
    facts.refs += 1


@jit
def pin_all(pool: Pool, table: BlockIds) -> None:
    """One holder more for each block of a table."""
    for i in range(len(table)):
        pin(pool, np.int64(table[i]))


@jit
def unpin(pool: Pool, block: int) -> bool:
    """One holder less; whether that was the last one. What becomes of the block is the caller's to say."""
    facts = pool.blocks[block]
    facts.refs -= 1
    if facts.refs > 0:
        return False
    if facts.state == CACHED:
        pool.state[0].idle += 1
    return True


@jit
def pin_hit(pool: Pool, tokens: Tokens, hashes: Hashes, space: int, table: BlockIds) -> tuple[int, int, int]:
    """Find the hit as in `match.find` and hold its full blocks and the block to copy from."""
    depth, source, common = find(pool, tokens, hashes, space, table)
    pin_all(pool, table[:depth])
    if source >= 0:
        pin(pool, source)
    return depth, source, common


@jit
def unpin_hit(pool: Pool, table: BlockIds) -> None:
    """Undo `pin_hit`: nothing has been used, so every block returns to its place in the order."""
    for i in range(len(table) - 1, -1, -1):
        block = np.int64(table[i])
        if unpin(pool, block) and eviction.is_leaf(pool, block):
            eviction.push(pool, block)


@jit
def use_hit(pool: Pool, table: BlockIds, missing: Hashes, now: float) -> None:
    """Count a use of each block of a hit that was just pinned, and which missing ones had been evicted."""
    for i in range(len(table)):
        block = np.int64(table[i])
        alone = pool.blocks[block].refs == 1
        habits.use(pool, block, now - pool.blocks[block].used_at if alone else 0.0)
    for i in range(len(missing)):
        habits.regret(pool, missing[i], now)


@jit
def take(pool: Pool, table: BlockIds, now: float, evicted: Hashes) -> None:
    """Fill `table` with blocks for a sequence's own use, free ones first.

    `evicted` uint64[len(table) - free] receives the hashes of evicted blocks, children before parents.
    """
    count = 0
    if len(evicted) > 0:
        habits.learn(pool)
    for i in range(len(table)):
        if pool.state[0].free > 0:
            table[i] = take_free(pool)
        else:
            victim = eviction.evict(pool, now)
            evicted[count] = pool.blocks[victim].hash
            table[i] = victim
            count += 1


@jit
def release(pool: Pool, table: BlockIds, now: float) -> None:
    """Let go of blocks, last one first: published ones may be evicted from now on, others are free."""
    for i in range(len(table) - 1, -1, -1):
        block = np.int64(table[i])
        if unpin(pool, block):
            if pool.blocks[block].state == CACHED:
                eviction.idle(pool, block, now)
            else:
                give_free(pool, block)


@jit
def _publish_one(
    pool: Pool, block: int, key: np.uint64, tokens: Tokens, start: int, parent: int, now: float
) -> None:
    facts = pool.blocks[block]
    facts.hash = key
    facts.parent = parent
    facts.child = -1
    facts.used_at = now
    facts.level = DEFAULT_LEVEL
    facts.state = CACHED
    for i in range(pool.tokens.shape[1]):
        pool.tokens[block, i] = tokens[start + i]
    habits.begin(pool, block, now)
    index.insert(pool, block)
    tree.attach(pool, parent, block)
    eviction.count_published(pool, 1, now)
    if parent < 0:
        pool.spaces[-1 - parent].users += 1


@jit
def publish(
    pool: Pool, tokens: Tokens, hashes: Hashes, table: BlockIds, start: int, space: int, now: float
) -> tuple[int, int]:
    """Make the blocks `start`... of a table visible, one for each hash, or replace them by visible twins.

    Returns the place up to which the table is visible now (less than len(hashes) if another prefix has taken
    a hash: nothing can be published below that) and the place of the first block that was not visible before.
    """
    size, fresh = pool.tokens.shape[1], -1
    parent = np.int64(table[start - 1]) if start > 0 else -1 - space
    for i in range(start, len(hashes)):
        own, twin = np.int64(table[i]), index.find(pool, hashes[i])
        if twin < 0:
            _publish_one(pool, own, hashes[i], tokens, i * size, parent, now)
            fresh = i if fresh < 0 else fresh
            twin = own
        elif not is_block_of(pool, twin, parent, tokens, i * size):
            return i, i if fresh < 0 else fresh
        elif twin != own:  # not what a forked sequence has published for both
            pin(pool, twin)
            habits.use(pool, twin, 0.0)
            table[i] = twin
            if unpin(pool, own):
                give_free(pool, own)
        parent = twin
    return len(hashes), len(hashes) if fresh < 0 else fresh


@jit
def find_owners(pool: Pool, owners: BlockIds) -> None:
    """Write the number of each CACHED or DEAD block's namespace to `owners` int32[N], which holds -1."""
    blocks = pool.blocks
    for start in range(len(blocks)):
        if blocks[start].state != CACHED and blocks[start].state != DEAD:
            continue
        top = np.int64(start)
        while owners[top] < 0 and blocks[top].parent >= 0:
            top = np.int64(blocks[top].parent)
        space = owners[top] if owners[top] >= 0 else -1 - blocks[top].parent
        block = np.int64(start)
        while block >= 0 and owners[block] < 0:
            owners[block] = space
            block = np.int64(blocks[block].parent)


@jit
def forget(pool: Pool, owners: BlockIds, space: int, now: float) -> int:
    """Unpublish all blocks of a namespace, or of all (-1); held ones become DEAD. Returns how many went.

    The search trees go as a whole, so nothing is taken out of them one by one.
    """
    gone = 0
    for block in range(len(pool.blocks)):
        facts = pool.blocks[block]
        if facts.state != CACHED or (space >= 0 and owners[block] != space):
            continue
        gone += 1
        index.remove(pool, block)
        if facts.parent < 0:
            pool.spaces[owners[block]].child = -1
            eviction.leave_space(pool, np.int64(owners[block]))
        if facts.refs == 0:
            pool.state[0].idle -= 1
            give_free(pool, block)
        else:
            facts.state = DEAD
    eviction.count_published(pool, -gone, now)
    return gone


@jit
def is_shared(pool: Pool, block: int) -> bool:
    """Whether a sequence that holds this block must not write into it."""
    return pool.blocks[block].refs > 1 or pool.blocks[block].state != PRIVATE
