"""Taking, holding, evicting and clearing blocks: exact ids, exact counts."""

import numpy as np
import pytest

from kvcore.cache import PrefixCache
from kvcore.errors import InvalidRequest, OutOfBlocks, StaleLease
from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace
from kvcore.stats import Room


def seq(*tokens):
    return np.array(tokens, dtype=np.int32)


def span(start, stop):
    return np.arange(start, stop, dtype=np.int32)


def figures(cache):
    stats = cache.stats()
    return stats.free, stats.cached, stats.held


def test_blocks_are_used_in_order_of_their_ids(cache, ns):
    assert cache.claim(span(0, 9), ns).blocks.tolist() == [0, 1, 2]
    assert cache.claim(span(50, 54), ns).blocks.tolist() == [3]
    assert figures(cache) == (4, 0, 4)


def test_tails_go_before_heads(make_cache, ns, run):
    cache = make_cache(num_blocks=4)
    run(cache, range(16), ns)
    depths = []
    for start in (100, 200, 300, 400):
        lease = run(cache, range(start, start + 4), ns)
        depths.append((lease.blocks.tolist(), cache.probe(span(0, 17), ns)))
    assert depths == [([3], 12), ([2], 8), ([1], 4), ([0], 0)]


def test_a_shared_head_outlives_both_tails(make_cache, ns, run):
    cache = make_cache(num_blocks=3)
    run(cache, [0, 0, 0, 0, 1, 1, 1, 1], ns)
    run(cache, [0, 0, 0, 0, 2, 2, 2, 2], ns)
    assert run(cache, [9, 9, 9, 9], ns).blocks.tolist() == [1]
    assert run(cache, [8, 8, 8, 8], ns).blocks.tolist() == [2]
    assert cache.probe(seq(0, 0, 0, 0, 1), ns) == 4


def test_the_least_recently_released_goes_first(make_cache, ns, run):
    cache = make_cache(num_blocks=3)
    for start in (0, 10, 20):
        run(cache, range(start, start + 4), ns)
    run(cache, [0, 1, 2, 3, 4], ns)  # uses block 0 again; its own block 1 evicts the oldest, [10..13]
    assert cache.probe(span(0, 5), ns) == 4
    assert cache.probe(span(10, 15), ns) == 0
    assert cache.probe(span(20, 25), ns) == 4


def test_a_held_path_is_never_evicted(make_cache, ns):
    cache = make_cache(num_blocks=4)
    lease = cache.claim(span(0, 8), ns)
    cache.commit(lease, 8)
    with pytest.raises(OutOfBlocks) as error:
        cache.claim(span(100, 112), ns)
    assert (error.value.needed, error.value.available) == (3, 2)
    assert cache.claim(span(100, 108), ns).blocks.tolist() == [2, 3]
    assert cache.probe(span(0, 9), ns) == 8


def test_hits_leave_the_order_before_new_blocks_are_taken(make_cache, ns, run):
    cache = make_cache(num_blocks=4)
    run(cache, range(8), ns)  # the oldest: blocks 0, 1
    run(cache, range(50, 58), ns)  # blocks 2, 3
    lease = cache.claim(span(0, 16), ns)
    assert lease.blocks.tolist() == [0, 1, 2, 3]
    assert lease.cached_tokens == 8


def test_hits_do_not_count_as_available(make_cache, ns, run):
    cache = make_cache(num_blocks=4)
    run(cache, range(12), ns)
    with pytest.raises(OutOfBlocks) as error:
        cache.claim(span(0, 20), ns)
    assert (error.value.needed, error.value.available) == (2, 1)
    cache.check()


def test_a_failed_claim_changes_nothing(make_cache, ns, run, victims):
    cache = make_cache(num_blocks=4)
    run(cache, range(8), ns)
    run(cache, range(50, 54), ns)
    before, order, seq_before = cache.stats(), victims(cache), cache.seq
    with pytest.raises(OutOfBlocks):
        cache.claim(span(0, 40), ns)
    with pytest.raises(OutOfBlocks):
        cache.claim(span(0, 40), Namespace("new"))
    assert (cache.stats(), victims(cache), cache.seq) == (before, order, seq_before)
    cache.check()


def test_a_failed_append_changes_nothing(make_cache, ns):
    cache = make_cache(num_blocks=2)
    lease = cache.claim(span(0, 8), ns)
    with pytest.raises(OutOfBlocks) as error:
        cache.append(lease, seq(8))
    assert (error.value.needed, error.value.available) == (1, 0)
    assert lease.tokens.tolist() == list(range(8)) and lease.blocks.tolist() == [0, 1]
    cache.check()


def test_free_blocks_are_used_before_any_cached_one(cache, ns, run):
    run(cache, range(16), ns)
    private = cache.claim(span(100, 116), ns, publish=False)
    cache.release(private)
    assert figures(cache) == (4, 4, 0)
    lease = cache.claim(span(200, 216), ns)
    assert lease.blocks.tolist() == [4, 5, 6, 7]
    assert cache.stats().evictions == 0


def test_appended_tokens_grow_the_block_table_only_when_needed(cache, ns):
    lease = cache.claim(seq(0), ns)
    tables = []
    for token in range(1, 10):
        cache.append(lease, seq(token))
        tables.append(len(lease.blocks))
    assert tables == [1, 1, 1, 2, 2, 2, 2, 3, 3]
    cache.append(lease, seq())
    assert len(lease) == 10
    cache.append(lease, span(10, 20))
    assert lease.blocks.tolist() == [0, 1, 2, 3, 4]
    cache.commit(lease, 20)
    assert cache.probe(span(0, 21), ns) == 20


def test_blocks_are_visible_only_after_commit(cache, ns):
    lease = cache.claim(span(0, 12), ns)
    seen = [cache.probe(span(0, 13), ns)]
    for computed in (3, 4, 7, 8, 12):
        cache.commit(lease, computed)
        seen.append(cache.probe(span(0, 13), ns))
    assert seen == [0, 0, 4, 4, 8, 12]


def test_an_abort_between_claim_and_commit_leaves_nothing(cache, ns):
    lease = cache.claim(span(0, 12), ns)
    cache.release(lease)
    assert figures(cache) == (8, 0, 0) and cache.seq == 0
    assert cache.probe(span(0, 13), ns) == 0


def test_an_abort_in_the_middle_leaves_what_was_committed(cache, ns):
    lease = cache.claim(span(0, 12), ns)
    cache.commit(lease, 9)
    cache.release(lease)
    assert figures(cache) == (6, 2, 0)
    assert cache.probe(span(0, 13), ns) == 8


@pytest.mark.parametrize("hashes", [[1, 2], np.zeros(2), np.zeros((2, 2), np.uint64), np.zeros(1, np.uint64)])
def test_hashes_of_a_wrong_kind_are_refused(cache, ns, hashes):
    with pytest.raises(InvalidRequest, match="uint64"):
        cache.claim(span(0, 9), ns, hashes=hashes)
    assert cache.stats().leases == 0


def test_commit_refuses_what_cannot_be(cache, ns):
    lease = cache.claim(span(0, 8), ns)
    cache.commit(lease, 4)
    for computed in (3, 9, -1):
        with pytest.raises(InvalidRequest):
            cache.commit(lease, computed)
    assert lease.computed == 4
    cache.check()


def test_identical_blocks_computed_twice_are_kept_once(cache, ns):
    first, second = cache.claim(span(0, 12), ns), cache.claim(span(0, 12), ns)
    assert second.blocks.tolist() == [3, 4, 5]
    cache.commit(first, 8)
    cache.commit(second, 12)
    assert second.blocks.tolist() == [0, 1, 5]
    assert figures(cache) == (4, 0, 4), "two own copies came back, block 5 is visible"
    cache.commit(first, 12)
    assert first.blocks.tolist() == [0, 1, 5]
    assert cache.stats().deduplicated == 3
    cache.release(first)
    assert figures(cache) == (5, 0, 3)
    cache.release(second)
    assert figures(cache) == (5, 3, 0)
    cache.check()


def test_release_is_idempotent_and_ends_the_lease(cache, ns):
    lease = cache.claim(span(0, 8), ns)
    cache.commit(lease, 8)
    for _ in range(3):
        cache.release(lease)
        assert figures(cache) == (6, 2, 0)
    with pytest.raises(StaleLease):
        cache.append(lease, seq(1))
    with pytest.raises(StaleLease):
        cache.commit(lease, 8)


def test_a_lease_of_another_cache_is_refused(make_cache, ns):
    lease = make_cache().claim(span(0, 8), ns)
    with pytest.raises(StaleLease):
        make_cache().commit(lease, 8)


def test_eviction_age_is_that_of_the_next_victim(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=2)
    assert cache.stats().eviction_age_s is None
    clock.now = 10.0
    run(cache, range(4), ns)
    clock.now = 25.0
    run(cache, range(50, 54), ns)
    clock.now = 40.0
    assert cache.stats().eviction_age_s == 30.0
    assert cache.room() == Room(0, 2, 0, 30.0)
    run(cache, range(90, 94), ns)
    assert cache.stats().eviction_age_s == 15.0
    held = cache.claim(span(50, 55), ns)
    assert held.blocks.tolist() == [1, 0] and cache.stats().eviction_age_s is None
    assert cache.room() == Room(0, 0, 2, None)


def test_counters(cache, ns, run):
    run(cache, range(8), ns)
    run(cache, range(9), ns)
    run(cache, [0, 1, 2, 3, 4, 5, 99], ns)
    stats = cache.stats()
    assert (stats.claims, stats.hit_tokens, stats.partial_hit_tokens, stats.missed_tokens) == (3, 14, 2, 10)
    assert (stats.stored, stats.evictions, stats.leases, stats.num_blocks) == (2, 0, 0, 8)
    assert stats.free / stats.num_blocks == 0.75


# --- Clearing ---


def test_clear_of_an_idle_namespace_removes_it_all(cache, ns, run):
    other = Namespace("other")
    run(cache, range(8), ns)
    run(cache, range(4), other)
    assert cache.clear(ns) == 0
    assert cache.probe(span(0, 9), ns) == 0
    assert cache.probe(span(0, 5), other) == 4
    assert figures(cache) == (7, 1, 0) and cache.stats().cleared == 2
    assert cache.clear() == 0
    assert figures(cache) == (8, 0, 0)
    cache.check()


def test_clear_in_use_says_how_many_and_they_die_on_release(cache, ns, run):
    run(cache, range(50, 58), ns)
    lease = cache.claim(span(0, 9), ns)
    cache.commit(lease, 9)
    sharer = cache.claim(span(0, 9), ns)
    assert cache.clear(ns) == 2
    cache.check()
    assert cache.probe(span(0, 9), ns) == 0
    assert cache.clear(ns) == 2, "they are still there"
    assert lease.blocks.tolist() == [2, 3, 4], "the sequence goes on with its blocks"
    cache.release(lease)
    assert figures(cache) == (5, 0, 3)
    cache.release(sharer)
    assert figures(cache) == (8, 0, 0) and cache.clear() == 0
    cache.check()


def test_a_sequence_from_before_a_clear_publishes_nothing_after_it(cache, ns):
    lease = cache.claim(span(0, 8), ns)
    assert cache.clear(ns) == 0, "nothing of it is visible yet"
    cache.commit(lease, 8)
    assert cache.probe(span(0, 9), ns) == 0
    new = cache.claim(span(0, 8), ns)
    cache.commit(new, 8)
    assert cache.probe(span(0, 9), ns) == 8
    cache.release(lease)
    cache.release(new)
    assert figures(cache) == (6, 2, 0)


def test_the_same_prompt_after_a_clear_in_use_gets_new_blocks(cache, ns):
    old = cache.claim(span(0, 4), ns)
    cache.commit(old, 4)
    cache.clear(ns)
    new = cache.claim(span(0, 4), ns)
    assert new.cached_tokens == 0 and new.blocks.tolist() == [1]
    cache.commit(new, 4)
    cache.check()
    cache.release(old)
    assert cache.probe(span(0, 5), ns) == 4
    cache.check()


def test_clear_of_one_namespace_leaves_the_sequences_of_others(cache, ns):
    other = cache.claim(span(0, 4), Namespace("other"))
    cache.claim(span(0, 4), ns)
    cache.clear(ns)
    cache.commit(other, 4)
    assert cache.probe(span(0, 5), Namespace("other")) == 4


def test_clear_while_a_copy_is_pending(make_cache, ns, run):
    cache = make_cache(num_blocks=4)
    run(cache, range(8), ns)
    lease = cache.claim(seq(0, 1, 2, 3, 4, 5, 99), ns)
    assert cache.clear() == 2
    assert lease.copy is not None, "its source is still there to be copied"
    cache.commit(lease, 7)
    assert figures(cache) == (2, 0, 2)
    cache.release(lease)
    assert figures(cache) == (4, 0, 0)
    cache.check()


def test_release_after_clear_has_no_effect_on_others(cache, ns):
    lease = cache.claim(span(0, 8), ns)
    cache.release(lease)
    cache.clear()
    cache.release(lease)
    assert figures(cache) == (8, 0, 0)
    cache.check()


def test_clear_of_an_unknown_namespace(cache, ns):
    assert cache.clear(Namespace("never seen")) == 0 and cache.seq == 0


# --- Construction, memory, check ---


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 0},
        {"num_blocks": -100},
        {"num_blocks": 10**20},
        {"block_size": 0},
        {"block_size": -1},
        {"policy": "magic"},
    ],
)
def test_wrong_configurations_are_refused(make_cache, options):
    with pytest.raises(InvalidRequest):
        make_cache(**options)


def test_at_most_120_bytes_a_block():
    cache = PrefixCache(100_000, 16, PrefixHasher(b"s"))
    assert cache.nbytes / cache.num_blocks <= 120


def test_a_large_pool_filled_and_replaced(ns):
    cache = PrefixCache(5_000, 16, PrefixHasher(b"s"), clock=lambda: 0.0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, 8000).astype(np.int32) for _ in range(20)]
    for prompt in prompts:
        lease = cache.claim(prompt, ns)
        cache.commit(lease, 8000)
        cache.release(lease)
    assert figures(cache) == (0, 5000, 0)
    assert [cache.probe(prompt, ns) for prompt in prompts[10:]] == [7999] * 10
    assert [cache.probe(prompt, ns) for prompt in prompts[:10]] == [0] * 10
    cache.check()


# What is wrong, and the block that is named for it.
DAMAGES = {
    "refs": (1, lambda pool: pool.blocks["refs"].__setitem__(1, 1)),
    "state": (1, lambda pool: pool.blocks["state"].__setitem__(1, 0)),
    "parent": (1, lambda pool: pool.blocks["parent"].__setitem__(1, 5)),
    "hash": (1, lambda pool: pool.blocks["hash"].__setitem__(1, 99)),
    "child": (1, lambda pool: pool.blocks["child"].__setitem__(1, -1)),
    "space": (0, lambda pool: pool.blocks["parent"].__setitem__(0, -4)),
    "a leaf not in the heap": (2, lambda pool: pool.habits["leaves"].fill(0)),
    "a leaf out of its place": (2, lambda pool: pool.blocks["used_at"].__setitem__(2, 9.0)),
    "the free list": (3, lambda pool: pool.state.__setitem__("free_head", 4)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_check_names_the_first_wrong_block(cache, ns, run, kind):
    run(cache, range(12), ns)
    block, damage = DAMAGES[kind]
    damage(cache._state.pool)
    with pytest.raises(AssertionError, match=f"block {block}:"):
        cache.check()
