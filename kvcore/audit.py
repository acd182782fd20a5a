"""Proof that a cache's structures agree with each other: what `PrefixCache.check` runs.

Everything is counted again from the leases and from the blocks' own facts, and compared with what the cache
believes. The first block that is wrong is named. Slow on purpose: plain loops that are easy to trust.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from kvcore.blocks import CACHED, DEAD, FREE, PRIVATE, BlockPool
from kvcore.eviction import EvictionOrder
from kvcore.lease import Lease
from kvcore.resident import ResidentBlocks


def check(pool: BlockPool, resident: ResidentBlocks, order: EvictionOrder, leases: Iterable[Lease]) -> None:
    """Raises `AssertionError` naming the first wrong block, if there is one."""
    leases = list(leases)
    _check_holders(pool, leases)
    _check_places(pool, order)
    _check_tree(pool, resident)
    _check_order(pool, order)
    _check_leases(pool, leases)
    _check_spaces(pool, resident, leases)


def _check_holders(pool: BlockPool, leases: list[Lease]) -> None:
    """Reference counts are exactly the holders that exist."""
    holders = Counter(block for lease in leases for block in lease.blocks.tolist())
    holders.update(lease.copy.src for lease in leases if lease.copy is not None)
    for block, refs in enumerate(pool.refs.tolist()):
        assert refs == holders[block], f"block {block}: {refs} references, {holders[block]} holders"


def _check_places(pool: BlockPool, order: EvictionOrder) -> None:
    """Every block is in exactly one of: the free stack, the eviction order, somebody's hands."""
    free, idle = Counter(pool.free_ids.tolist()), Counter(order.ids().tolist())
    assert len(order) == idle.total(), f"the order counts {len(order)} blocks and has {idle.total()}"
    state, refs = pool.state.tolist(), pool.refs.tolist()
    for block in range(pool.num_blocks):
        held = refs[block] > 0
        places = free[block] + idle[block] + held
        assert places == 1, f"block {block}: in {places} places, must be in one of free, idle and held"
        allowed = {FREE} if free[block] else {CACHED} if idle[block] else {PRIVATE, CACHED, DEAD}
        assert state[block] in allowed, f"block {block}: state {state[block]}, must be in {allowed}"


def _check_tree(pool: BlockPool, resident: ResidentBlocks) -> None:
    """Index and children list exactly the CACHED blocks, and those are prefix-closed."""
    cached = np.flatnonzero(pool.state == CACHED).tolist()
    assert len(resident.index) == len(cached), f"index has {len(resident.index)} blocks, not {len(cached)}"
    expected: dict[int, list[int]] = {-1 - space: [] for space in range(pool.num_blocks)}
    expected.update({block: [] for block in range(pool.num_blocks)})
    for block in cached:
        parent, key = int(pool.parents[block]), int(pool.hashes[block])
        assert resident.index.find_one(key) == block, f"block {block}: not found under its hash"
        assert int(resident.index.find(pool.hashes[[block]])[0]) == block, f"block {block}: not found in bulk"
        if parent >= 0:
            assert pool.state[parent] == CACHED, f"block {block}: its parent {parent} is not cached"
            assert pool.spaces[parent] == pool.spaces[block], f"block {block}: parent of another namespace"
            assert pool.refs[parent] >= (pool.refs[block] > 0), f"block {block}: held, parent {parent} is not"
        else:
            assert parent == -1 - pool.spaces[block], f"block {block}: below the root of another namespace"
        expected.setdefault(parent, []).append(block)
    for parent, blocks in expected.items():
        blocks.sort(key=lambda block: pool.tokens[block].tolist())
        found = resident.children.children(parent)
        assert found == blocks, f"block {parent}: children {found}, must be {blocks}"


def _check_order(pool: BlockPool, order: EvictionOrder) -> None:
    """A block is evicted only after its children."""
    place = {block: i for i, block in enumerate(order.ids().tolist())}
    assert order.first() == (order.ids()[0] if place else -1), f"block {order.first()}: not the first victim"
    for block, i in place.items():
        parent = int(pool.parents[block])
        assert parent < 0 or place.get(parent, i + 1) > i, f"block {parent}: goes before its child {block}"


def _check_leases(pool: BlockPool, leases: list[Lease]) -> None:
    """Block tables have the right size and distinct blocks; published ones hold the lease's own tokens."""
    size = pool.block_size
    for lease in leases:
        table = lease.blocks.tolist()
        assert len(table) == -(-len(lease) // size), f"a lease of {len(lease)} tokens has {len(table)} blocks"
        double = [block for block, times in Counter(table).items() if times > 1]
        assert not double, f"block {double[0]}: twice in one lease"
        assert lease.computed <= len(lease), f"{lease.computed} of {len(lease)} tokens computed"
        parent = -1 - lease.space
        for i, block in enumerate(table):
            state = pool.state[block]
            if i >= lease.published:
                assert state == PRIVATE, f"block {block}: published behind its sequence's back"
                continue
            dead = state == DEAD and not lease.publishing
            assert state == CACHED or dead, f"block {block}: published, but in state {state}"
            own = lease.tokens[i * size : (i + 1) * size]
            assert np.array_equal(pool.tokens[block], own), f"block {block}: holds other tokens"
            assert pool.parents[block] == parent, f"block {block}: parent is not {parent}"
            parent = block


def _check_spaces(pool: BlockPool, resident: ResidentBlocks, leases: list[Lease]) -> None:
    """Namespaces are known exactly as long as blocks or leases use them."""
    users = Counter(pool.spaces[pool.state == CACHED].tolist())
    users.update(lease.space for lease in leases)
    assert len(resident.spaces) == len(users), f"{len(resident.spaces)} namespaces known, {len(users)} used"
    for space, count in users.items():
        known = resident.spaces.users(space)
        assert known == count, f"namespace {space}: {known} users counted, there are {count}"
        assert resident.spaces.find(resident.spaces.digest(space)) == space, f"namespace {space}: not found"
