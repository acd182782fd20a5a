"""Who holds which block: the steps of a sequence's life, each one compiled call over its block table.

A table is int32[k], block ids in the order of the tokens. Nothing here fails: the cache has made sure of
blocks to take and of room in the heap.
"""

import numpy as np
import numpy.typing as npt

from kvcore import eviction, index, tree
from kvcore.blocks import CACHED, DEAD, DEFAULT_LEVEL, PRIVATE, BlockIds, Pool, give_free, take_free
from kvcore.jit import jit
from kvcore.match import Hashes, Tokens, find, is_block_of

_MOST_USES = 65_535


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
    """One holder less; whether that was the last one. What becomes of an idle block is the caller's to say."""
    facts = pool.blocks[block]
    facts.refs -= 1
    if facts.refs > 0:
        return False
    if facts.state == CACHED:
        pool.state[0].idle += 1
    return True


@jit
def pin_hit(
    pool: Pool, tokens: Tokens, hashes: Hashes, space: int, table: BlockIds
) -> tuple[int, int, int]:
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
def evicted_at(pool: Pool, key: np.uint64) -> float:
    """When a block with this hash was evicted, on the cache's clock; 0 if that is not remembered."""
    ghost = pool.ghosts[key % np.uint64(pool.ghosts.shape[0])]
    if ghost.evicted_at > 0 and ghost.tag == key >> np.uint64(32):
        return pool.state[0].started_at + ghost.evicted_at
    return 0.0


@jit
def use_hit(pool: Pool, table: BlockIds, missing: Hashes, now: float) -> None:
    """Count a use of each block of a hit, and what of the missing ones was evicted too early."""
    for i in range(len(table)):
        facts = pool.blocks[table[i]]
        if facts.uses < _MOST_USES:
            facts.uses += 1
    state = pool.state[0]
    for i in range(len(missing)):
        since = evicted_at(pool, missing[i])
        if since > 0:
            state.regrets += 1
            state.regret_s += now - since
            pool.ghosts[missing[i] % np.uint64(pool.ghosts.shape[0])].evicted_at = 0


@jit
def take(pool: Pool, table: BlockIds, now: float, evicted: Hashes) -> None:
    """Fill `table` with blocks for a sequence's own use, free ones first.

    `evicted` uint64[len(table) - free] receives the hashes of evicted blocks, children before parents.
    """
    count = 0
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
                pool.blocks[block].used_at = now
                if pool.blocks[block].child < 0:
                    eviction.push(pool, block)
            else:
                give_free(pool, block)


@jit
def _publish_one(
    pool: Pool, block: int, key: np.uint64, tokens: Tokens, start: int, parent: int, space: int, now: float
) -> None:
    facts = pool.blocks[block]
    facts.hash = key
    facts.parent = parent
    facts.space = space
    facts.child = -1
    facts.uses = 1
    facts.level = DEFAULT_LEVEL
    facts.stored_at = now - pool.state[0].started_at
    facts.state = CACHED
    for i in range(pool.tokens.shape[1]):
        pool.tokens[block, i] = tokens[start + i]
    index.insert(pool, block)
    tree.attach(pool, parent, block)
    pool.state[0].published += 1
    pool.spaces[space].users += 1


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
            _publish_one(pool, own, hashes[i], tokens, i * size, parent, space, now)
            fresh = i if fresh < 0 else fresh
            twin = own
        elif not is_block_of(pool, twin, parent, tokens, i * size):
            return i, i if fresh < 0 else fresh
        elif twin != own:  # not what a forked sequence has published for both
            pin(pool, twin)
            pool.blocks[twin].uses = min(np.int64(pool.blocks[twin].uses) + 1, _MOST_USES)
            table[i] = twin
            if unpin(pool, own):
                give_free(pool, own)
        parent = twin
    return len(hashes), len(hashes) if fresh < 0 else fresh


@jit
def forget(pool: Pool, space: int) -> int:
    """Unpublish all blocks of a namespace, or of all (-1); held ones become DEAD. Returns how many went.

    The search trees go as a whole, so nothing is taken out of them one by one.
    """
    gone = 0
    for block in range(pool.blocks.shape[0]):
        facts = pool.blocks[block]
        if facts.state != CACHED or (space >= 0 and facts.space != space):
            continue
        gone += 1
        index.remove(pool, block)
        pool.state[0].published -= 1
        if facts.parent < 0:
            pool.spaces[facts.space].child = -1
        eviction.leave_space(pool, np.int64(facts.space), 1)
        if facts.refs == 0:
            pool.state[0].idle -= 1
            give_free(pool, block)
        else:
            facts.state = DEAD
    return gone


@jit
def is_shared(pool: Pool, block: int) -> bool:
    """Whether a sequence that holds this block must not write into it."""
    return pool.blocks[block].refs > 1 or pool.blocks[block].state != PRIVATE
