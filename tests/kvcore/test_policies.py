"""One contract for every eviction policy, in exact blocks and counts, and what each policy is about."""

import numpy as np
import pytest

from kvcore.errors import InvalidRequest, OutOfBlocks
from kvcore.eviction import POLICIES
from kvcore.retention import Retention


def seq(*tokens):
    return np.array(tokens, dtype=np.int32)


def span(start, stop):
    return np.arange(start, stop, dtype=np.int32)


def figures(cache):
    stats = cache.stats()
    return stats.free, stats.cached, stats.held


@pytest.fixture(params=sorted(POLICIES))
def make(request, make_cache):
    """A cache with the policy of the test's turn."""
    return lambda num_blocks: make_cache(num_blocks=num_blocks, policy=request.param)


# --- The contract ---


def test_tails_go_before_heads(make, ns, run, victims):
    cache = make(6)
    run(cache, range(16), ns)
    assert victims(cache) == [3, 2, 1, 0]
    hits = []
    for start in (100, 200, 300, 400):
        run(cache, range(start, start + 16), ns, publish=False)
        hits.append(cache.probe(span(0, 17), ns))
    assert hits == [8, 8, 8, 8], "four blocks at once: two free ones and two tails"


def test_a_shared_head_outlives_both_tails(make, ns, run, victims):
    cache = make(3)
    run(cache, [0, 0, 0, 0, 1, 1, 1, 1], ns)
    run(cache, [0, 0, 0, 0, 2, 2, 2, 2], ns)
    assert victims(cache) == [1, 2, 0]


def test_a_held_path_is_never_evicted(make, ns, run):
    cache = make(4)
    run(cache, range(12), ns)
    lease = cache.claim(span(0, 9), ns)  # holds blocks 0 and 1, and the free one
    assert lease.blocks.tolist() == [0, 1, 3]
    assert cache.claim(span(50, 54), ns).blocks.tolist() == [2]
    with pytest.raises(OutOfBlocks) as error:
        cache.claim(span(60, 64), ns)
    assert (error.value.needed, error.value.available) == (1, 0)
    assert cache.probe(span(0, 13), ns) == 8


def test_hits_leave_the_order_before_new_blocks_are_taken(make, ns, run):
    cache = make(4)
    run(cache, range(8), ns)
    run(cache, range(50, 58), ns)
    lease = cache.claim(span(0, 16), ns)
    assert lease.blocks.tolist() == [0, 1, 2, 3] and lease.cached_tokens == 8


def test_a_claim_that_fails_changes_nothing(make, ns, run, victims):
    cache = make(5)
    run(cache, range(8), ns)
    run(cache, range(50, 58), ns)
    before, order, seq_before = cache.stats(), victims(cache), cache.seq
    for wanted in (span(0, 40), seq(*range(8), *range(90, 120)), span(50, 80)):
        with pytest.raises(OutOfBlocks):
            cache.claim(wanted, ns)
        assert (cache.stats(), victims(cache), cache.seq) == (before, order, seq_before)
        cache.check()


def test_free_blocks_are_used_before_cached_ones(make, ns, run):
    cache = make(8)
    run(cache, range(16), ns)
    run(cache, range(100, 116), ns, publish=False)
    assert figures(cache) == (4, 4, 0)
    assert cache.claim(span(200, 216), ns).blocks.tolist() == [4, 5, 6, 7]
    assert cache.stats().evictions == 0


def test_all_idle_blocks_can_go(make, ns, run):
    cache = make(8)
    for end in ([1] * 4, [2] * 8, [3] * 12):
        run(cache, [0] * 4 + end, ns)
    assert figures(cache) == (1, 7, 0)
    assert cache.claim(span(100, 132), ns).blocks.tolist() == list(range(8))
    assert (cache.stats().evictions, cache.stats().published) == (7, 0)


def test_a_probe_does_not_change_the_order(make, ns, run, victims, clock):
    cache = make(4)
    for start in (0, 100, 200):
        clock.now += 10.0
        run(cache, range(start, start + 4), ns)
    order = victims(cache)
    clock.now += 1000.0
    assert cache.probe(span(0, 5), ns) == 4
    assert cache.explain(span(0, 5), ns).hit_tokens == 4
    assert victims(cache) == order == [0, 1, 2]


def test_evicted_blocks_are_told_children_first(make, ns, run):
    cache = make(3)
    lease = run(cache, range(12), ns)
    hashes = lease.hashes.tolist()
    run(cache, range(50, 62), ns)
    removed = cache.events.since(77, 1)[0]
    assert removed.hashes.tolist() == hashes[::-1] and removed.reason == "evicted"


def test_lower_levels_drain_completely_first(make, ns, run, victims, clock):
    cache = make(8)
    for start, level in ((0, 36), (100, 34), (200, 0)):
        clock.now += 1000.0
        run(cache, range(start, start + 8), ns, retention=[Retention(0, None, level)])
    clock.now += 1000.0
    run(cache, range(300, 308), ns)
    assert victims(cache) == [5, 4, 3, 2, 7, 6, 1, 0]


def test_a_whole_life_keeps_count(make, ns):
    cache = make(8)
    first = cache.claim(span(0, 10), ns)
    cache.commit(first, 10)
    second = cache.fork(first)
    cache.append(second, seq(99))
    cache.commit(second, 11)
    cache.truncate(first, 5)
    assert (figures(cache), first.blocks.tolist(), second.blocks.tolist()) == ((5, 0, 3), [0, 1], [0, 1, 3])
    cache.release(first)
    cache.release(second)
    assert figures(cache) == (6, 2, 0)
    assert cache.clear(ns) == 0 and figures(cache) == (8, 0, 0)
    cache.check()


# --- Each policy ---

ORDERS = {
    "lru": ["C", "A", "B", "D"],
    "priority": ["C", "A", "B", "D"],
    "reuse": ["C", "A", "B", "D"],  # nothing was evicted yet: no bonus has been learnt
    "lfu": ["C", "D", "B", "A"],
    "fifo": ["A", "B", "C", "D"],
}


@pytest.mark.parametrize("policy", ORDERS)
def test_the_order_of_each_policy(make_cache, ns, run, victims, clock, policy):
    """A is stored at 0 s, hit at 210, 220 and 230; B stored at 100, hit at 250; C stored at 200, D at 300."""
    cache = make_cache(policy=policy)
    uses = [(0, "A"), (100, "B"), (200, "C"), (210, "A"), (220, "A"), (230, "A"), (250, "B"), (300, "D")]
    for clock.now, name in uses:
        run(cache, [ord(name)] * 4 + [0], ns)
    assert ["ABCD"[block] for block in victims(cache)] == ORDERS[policy]


@pytest.mark.parametrize(("policy", "hits", "bonus"), [("lfu", 1, 300), ("lfu", 3, 600)])
@pytest.mark.parametrize("late", [-1, 1])
def test_a_used_block_counts_as_used_later(make_cache, ns, run, victims, clock, policy, hits, bonus, late):
    cache = make_cache(policy=policy)
    for _ in range(1 + hits):
        run(cache, [1, 1, 1, 1, 0], ns)
    clock.now = bonus + late
    run(cache, [2, 2, 2, 2, 0], ns)
    assert victims(cache) == ([1, 0] if late < 0 else [0, 1])


def test_frequency_decays(make_cache, ns, run, victims, clock):
    """Eight uses are worth three half-lives of 300 s."""
    for age, order in ((899.0, [1, 0]), (901.0, [0, 1])):
        clock.now = 0.0
        cache = make_cache(policy="lfu")
        for _ in range(8):
            run(cache, [1, 1, 1, 1, 0], ns)
        clock.now = age
        run(cache, [2, 2, 2, 2, 0], ns)
        assert victims(cache) == order


def test_storing_the_same_twice_counts_as_a_use(cache, ns, run):
    run(cache, range(4), ns, read=False)
    run(cache, range(4), ns, read=False)
    assert cache._state.pool.blocks["uses"][0] == 2


def test_the_count_of_uses_ends_at_65535(cache, ns, run):
    run(cache, range(5), ns)
    cache._state.pool.blocks["uses"][0] = 65_534
    for _ in range(3):
        run(cache, range(5), ns)
        run(cache, range(5), ns, read=False)
    assert cache._state.pool.blocks["uses"][0] == 65_535


def test_a_clock_that_stands_still_still_orders(make_cache, ns, run, victims):
    cache = make_cache(policy="lru")
    for start in (0, 10, 20, 0, 10):
        run(cache, range(start, start + 5), ns)
    assert victims(cache) == [2, 0, 1]


def test_an_unknown_policy_is_refused(make_cache):
    with pytest.raises(InvalidRequest, match="'LRU'; known: fifo, lfu, lru, priority, reuse"):
        make_cache(policy="LRU")
