"""The heap of leaves alone: against a sorted list for every policy, with stale entries, and how it grows."""

import math
import random

import pytest

from kvcore import eviction
from kvcore.blocks import CACHED, PRIVATE

RANKS = {
    "lru": lambda facts: facts["used_at"],
    "priority": lambda facts: facts["used_at"],
    "reuse": lambda facts: facts["used_at"],
    "lfu": lambda facts: facts["used_at"] + 300.0 * math.log2(facts["uses"]),
    "fifo": lambda facts: facts["used_at"],
}


def make_leaf(pool, block, used_at=0.0, uses=1, level=35):
    """An idle published block without children, entered in the heap."""
    facts = pool.blocks[block]
    facts["state"], facts["refs"], facts["child"], facts["hash"] = CACHED, 0, -1, block
    facts["used_at"], facts["uses"], facts["level"] = used_at, uses, level
    eviction.push(pool, block)


def drain(pool):
    """Blocks as they come up; each one is taken, so that its entry is stale."""
    order = []
    while (block := eviction.first(pool)) >= 0:
        order.append(block)
        pool.blocks["state"][block] = PRIVATE
    return order


def test_every_policy_has_a_rank_here():
    assert RANKS.keys() == eviction.POLICIES.keys()


@pytest.mark.parametrize("policy", RANKS)
def test_against_a_sorted_list(make_cache, policy):
    rng = random.Random(policy)
    for size in (1, 2, 7, 300):
        pool = eviction.roomy(make_cache(num_blocks=size, policy=policy)._state.pool, size)
        for block in rng.sample(range(size), size):
            make_leaf(pool, block, rng.random() * 2000, rng.choice([1, 1, 2, 3, 65_535]), rng.randrange(3))
        pool.habits["bonus"] = bonus = [-700.0, -200.0, -1.5] if policy == "reuse" else [0.0] * 3
        rank = RANKS[policy]
        places = [(f["level"], rank(f) + bonus[min(f["uses"], 3) - 1]) for f in pool.blocks]
        expected = sorted(range(size), key=places.__getitem__)
        assert [eviction.rank(pool, i) for i in range(size)] == [rank(facts) for facts in pool.blocks]
        assert drain(pool) == expected
        assert pool.habits["leaves"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("field", "value"), [("state", PRIVATE), ("refs", 1), ("child", 5), ("used_at", 9.0), ("level", 36)]
)
def test_an_entry_that_no_longer_fits_its_block_is_dropped(make_cache, field, value):
    pool = make_cache(policy="lru")._state.pool
    make_leaf(pool, 0, used_at=1.0)
    make_leaf(pool, 1, used_at=2.0)
    pool.blocks[field][0] = value
    assert eviction.first(pool) == 1
    assert pool.habits["leaves"][0] == 1


def test_a_block_entered_again_goes_by_its_new_place(make_cache):
    pool = make_cache(policy="lru")._state.pool
    for block in range(3):
        make_leaf(pool, block, used_at=float(block))
    make_leaf(pool, 0, used_at=9.0)
    make_leaf(pool, 1, used_at=1.0, level=80)
    assert drain(pool) == [2, 0, 1]


def test_a_block_that_is_twice_in_the_heap_goes_once(make_cache):
    pool = make_cache(policy="lru")._state.pool
    make_leaf(pool, 0)
    make_leaf(pool, 0)
    assert drain(pool) == [0]


def test_the_heap_grows_only_when_leaves_need_it(make_cache):
    pool = make_cache(num_blocks=100, policy="lru")._state.pool
    assert pool.heaps.shape == (3, 64) and eviction.roomy(pool, 64) is pool
    sizes = []
    for again in range(40):
        for block in range(10):
            pool = eviction.roomy(pool, 1)
            sizes.append(pool.heaps.shape[1])
            make_leaf(pool, block, used_at=10.0 * again + block)
    assert sizes == [64] * 64 + [129] * 336, "390 of the 400 entries were stale"
    larger = eviction.roomy(pool, 200)
    assert larger.heaps.shape[1] >= 210 and larger.habits["leaves"][0] == 10
    assert drain(larger) == list(range(10))


def test_a_full_heap_grows_before_an_eviction_enters_a_parent(make_cache, ns, run):
    cache = make_cache(num_blocks=200)
    for last in range(3):
        run(cache, [1] * 4 + [last], ns)  # a parent used three times
    run(cache, [1] * 4 + [2] * 4, ns)  # its child, used once, goes first
    for head in (3, 4):
        for _ in range(3):
            run(cache, [head] * 5, ns)
    leases, free = [], cache.stats().free  # the look for the next victim drops the parent's stale entry
    for filled in range(cache._state.pool.habits["leaves"][2], cache._state.pool.heaps.shape[1]):
        assert cache._state.pool.habits["leaves"][2] == filled
        leases.append(cache.claim([4, 4, 4, 9], ns))  # three tokens are copied from a leaf of the third heap
        cache.commit(leases[-1], 3)
    leases.append(cache.claim(range(100, 100 + 4 * (free - len(leases) + 1)), ns))
    assert cache.stats().evictions == 1
    cache.check()
    for lease in leases:
        cache.release(lease)
    cache.check()
