"""Proof that a cache's structures agree with each other: what `PrefixCache.check` runs.

Everything is counted again from the leases and from the blocks' own facts, and compared with what the cache
believes. The first block that is wrong is named. Slow on purpose: plain loops that are easy to trust.
"""

from collections import Counter
from itertools import pairwise

import numpy as np

from kvcore import eviction, index, tree
from kvcore.blocks import CACHED, DEAD, FREE, PRIVATE, Pool
from kvcore.lease import Lease
from kvcore.occupancy import Occupancy


def check(state: Occupancy) -> None:
    """Raises `AssertionError` naming the first wrong block, if there is one."""
    _check_holders(state.pool, state.leases)
    _check_places(state.pool)
    _check_tree(state.pool)
    _check_leaves(state.pool)
    for lease in state.leases:
        _check_lease(state.pool, lease)
    _check_spaces(state)


def _check_holders(pool: Pool, leases: set[Lease]) -> None:
    """Reference counts are exactly the holders that exist."""
    holders = Counter(block for lease in leases for block in lease.blocks.tolist())
    holders.update(lease.copy.src for lease in leases if lease.copy is not None)
    for block, refs in enumerate(pool.blocks["refs"].tolist()):
        assert refs == holders[block], f"block {block}: {refs} references, {holders[block]} holders"


def free_blocks(pool: Pool) -> list[int]:
    """The free blocks, next one to be used first."""
    free, block = [], int(pool.state["free_head"][0])
    for _ in range(int(pool.state["free"][0])):
        free.append(block)
        block = int(pool.blocks["left"][block])
    return free


def _check_places(pool: Pool) -> None:
    """Every block is free, idle or held, and each of these is counted."""
    free = Counter(free_blocks(pool))
    idle = 0
    for block, (state, refs) in enumerate(zip(pool.blocks["state"], pool.blocks["refs"], strict=True)):
        assert free[block] == (state == FREE), f"block {block}: {free[block]} times in the free list"
        allowed = {PRIVATE, CACHED, DEAD} if refs else {FREE, CACHED}
        assert state in allowed, f"block {block}: state {state} with {refs} references"
        idle += state == CACHED and refs == 0
    counted = int(pool.state["idle"][0])
    assert counted == idle, f"{counted} idle blocks counted, there are {idle}"


def _children(pool: Pool, block: int) -> list[int]:
    """The blocks of a tree of siblings, in its order."""
    if block < 0:
        return []
    left, right = int(pool.blocks["left"][block]), int(pool.blocks["right"][block])
    return [*_children(pool, left), block, *_children(pool, right)]


def _check_tree(pool: Pool) -> None:
    """Index and trees list exactly the CACHED blocks, and those are prefix-closed."""
    facts = pool.blocks
    cached = np.flatnonzero(facts["state"] == CACHED).tolist()
    counts = {len(cached), int(np.count_nonzero(pool.slots[:, 1:])), int(pool.state["published"][0])}
    assert len(counts) == 1, f"{counts}: blocks published, in the hash table, and counted"
    expected: dict[int, list[int]] = {block: [] for block in cached}
    for block in cached:
        parent = int(facts["parent"][block])
        assert index.find(pool, facts["hash"][block]) == block, f"block {block}: not found under its hash"
        if parent >= 0:
            assert facts["state"][parent] == CACHED, f"block {block}: its parent {parent} is not cached"
            held = facts["refs"][parent] >= (facts["refs"][block] > 0)
            assert held, f"block {block}: held, its parent {parent} is not"
        else:
            assert pool.spaces["users"][-1 - parent] > 0, f"block {block}: in a namespace that nobody uses"
        expected.setdefault(parent, []).append(block)
    for parent, blocks in expected.items():
        found = _children(pool, tree.first_child(pool, parent))
        blocks.sort(key=lambda block: pool.tokens[block].tolist())
        assert found == blocks, f"block {parent}: children {found}, must be {blocks}"


def _check_leaves(pool: Pool) -> None:
    """Every block that can go has a valid entry in its heap, and each heap is one."""
    entries = set()
    for heap, count in enumerate(pool.habits["leaves"].tolist()):
        assert count <= pool.heaps.shape[1], f"heap {heap}: {count} entries are more than it has room for"
        keys = pool.heaps[heap, :count][["level", "rank"]].tolist()
        for i in range(1, count):
            assert keys[(i - 1) // 2] <= keys[i], f"entry {i} of heap {heap} is before its parent"
        blocks = pool.heaps["block"][heap, :count].tolist()
        entries |= {(heap, block, rank, level) for block, (level, rank) in zip(blocks, keys, strict=True)}
    for block in np.flatnonzero(pool.blocks["state"] == CACHED).tolist():
        if eviction.is_leaf(pool, block):
            rank, level = eviction.rank(pool, block), int(pool.blocks["level"][block])
            entry = (eviction.heap_of(pool, block), block, rank, level)
            assert entry in entries, f"block {block}: a leaf without its entry"


def _check_lease(pool: Pool, lease: Lease) -> None:
    """A block table has the right size and distinct blocks; published ones hold the lease's own tokens."""
    size, table = pool.tokens.shape[1], lease.blocks.tolist()
    assert len(table) == -(-len(lease) // size), f"a lease of {len(lease)} tokens has {len(table)} blocks"
    for one, other in pairwise(sorted(table)):
        assert one != other, f"block {one}: twice in one lease"
    assert lease.computed <= len(lease), f"{lease.computed} of {len(lease)} tokens computed"
    parent = -1 - lease.space
    for i, block in enumerate(table[: lease.published]):
        state = pool.blocks["state"][block]
        dead = state == DEAD and not lease.publishing
        assert state == CACHED or dead, f"block {block}: published, but in state {state}"
        own = lease.tokens[i * size : (i + 1) * size]
        assert np.array_equal(pool.tokens[block], own), f"block {block}: holds other tokens"
        assert pool.blocks["parent"][block] == parent, f"block {block}: parent is not {parent}"
        parent = block


def _check_spaces(state: Occupancy) -> None:
    """Namespaces are known exactly as long as first blocks or leases use them."""
    blocks = state.pool.blocks
    roots = blocks["parent"][(blocks["state"] == CACHED) & (blocks["parent"] < 0)]
    users = Counter((-1 - roots).tolist())
    users.update(lease.space for lease in state.leases)
    assert len(state.spaces) == len(users), f"{len(state.spaces)} namespaces known, {len(users)} used"
    for digest, space in state.spaces:
        known = int(state.pool.spaces["users"][space])
        assert known == users[space], f"namespace {space}: {known} users counted, there are {users[space]}"
        assert state.spaces.digest(space) == digest, f"namespace {space}: not the one it was"
