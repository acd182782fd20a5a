"""Counters: tokens hit and missed, lives of evicted blocks, and what was evicted too early."""

import numpy as np
import pytest

from kvcore.errors import OutOfBlocks


def seq(*tokens):
    return np.array(tokens, dtype=np.int32)


def span(start, stop):
    return np.arange(start, stop, dtype=np.int32)


def seconds(value):
    return pytest.approx(value, abs=1e-6)


def regrets(cache):
    stats = cache.stats()
    return stats.regrets, round(stats.regret_s, 6)


def test_tokens(cache, ns, run):
    run(cache, range(8), ns)  # 8 missed
    run(cache, range(9), ns)  # 8 hit, 1 missed
    run(cache, [0, 1, 2, 3, 4, 5, 99], ns)  # 4 hit in full, 2 copied, 1 missed
    run(cache, range(8), ns, read=False)  # 8 missed
    stats = cache.stats()
    assert (stats.claims, stats.hit_tokens, stats.partial_hit_tokens, stats.missed_tokens) == (4, 14, 2, 18)
    assert (stats.stored, stats.deduplicated, stats.published) == (2, 2, 2)


def test_refused_claims_count_nothing(cache, ns):
    with pytest.raises(OutOfBlocks):
        cache.claim(span(0, 100), ns)
    stats = cache.stats()
    assert (stats.claims, stats.hit_tokens, stats.missed_tokens) == (0, 0, 0)


def test_lifetime_and_idle_time(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=2)
    run(cache, [1, 1, 1, 1], ns)  # stored at 0 s
    clock.now = 10.0
    run(cache, [1, 1, 1, 1, 0], ns)  # used until 10 s
    clock.now = 20.0
    run(cache, [2, 2, 2, 2], ns)  # stored and used at 20 s
    clock.now = 50.0
    cache.claim(span(50, 58), ns)
    stats = cache.stats()
    assert (stats.evictions, stats.cleared) == (2, 0)
    assert stats.block_seconds == seconds(50 + 30) and stats.idle_s == seconds(40 + 30)


def test_cleared_blocks_are_not_evicted_ones(cache, ns, run):
    run(cache, range(12), ns)
    cache.clear(ns)
    stats = cache.stats()
    assert (stats.evictions, stats.cleared, stats.regrets, stats.idle_s) == (0, 3, 0, 0.0)


def test_a_regret_counts_once_and_with_its_time(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=2)
    run(cache, [1, 1, 1, 1], ns)
    clock.now = 50.0
    run(cache, range(50, 58), ns)  # evicts it
    assert regrets(cache) == (0, 0.0)
    clock.now = 80.0
    for _ in range(2):
        cache.release(cache.claim(seq(1, 1, 1, 1), ns, publish=False))
        assert regrets(cache) == (1, 30.0)


def test_looking_and_not_reading_regret_nothing(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=2)
    run(cache, [1, 1, 1, 1], ns)
    clock.now = 50.0
    run(cache, range(50, 58), ns)
    cache.probe(seq(1, 1, 1, 1, 0), ns)
    cache.explain(seq(1, 1, 1, 1, 0), ns)
    cache.release(cache.claim(seq(1, 1, 1, 1), ns, read=False))
    with pytest.raises(OutOfBlocks):
        cache.claim(seq(*[1] * 12), ns)
    assert regrets(cache) == (0, 0.0)


def test_every_evicted_block_of_a_prompt_is_a_regret_of_its_own(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=100)
    run(cache, range(12), ns)
    clock.now = 10.0
    run(cache, range(1000, 1400), ns)
    clock.now = 15.0
    lease = cache.claim(span(0, 12), ns)
    hashes, ghosts = lease.hashes.tolist(), len(cache._state.pool.ghosts)
    # All 100 evictions since share the ghost table; what they overwrote is not remembered.
    assert len({key % ghosts for key in hashes}) == 3
    assert regrets(cache) == (3, 15.0)


def test_what_was_evicted_and_stored_again_is_evicted_again(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=1)
    for turn in range(4):
        clock.now = 10.0 * turn
        run(cache, [turn % 2] * 4, ns)
    assert cache.stats().evictions == 3
    assert regrets(cache) == (2, 20.0), "each was missed 10 s after it went"


def test_the_share_of_free_blocks(cache, ns, run):
    run(cache, range(8), ns)
    cache.claim(span(50, 58), ns)
    assert cache.stats().free == 0.5 * cache.num_blocks
