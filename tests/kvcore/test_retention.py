"""Priority levels for ranges of tokens, with durations: who goes first, and when levels end."""

import math

import numpy as np
import pytest

from kvcore.errors import InvalidRequest
from kvcore.lease import Prompt
from kvcore.retention import Retention


def span(start, stop):
    return np.arange(start, stop, dtype=np.int32)


def levels(cache, lease):
    return cache._state.pool.blocks["level"][lease.blocks].tolist()


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([], [35, 35, 35, 35]),
        ([Retention(0, None, 80)], [80, 80, 80, 80]),
        ([Retention(0, 8, 80), Retention(8, None, 10)], [80, 80, 10, 10]),
        ([Retention(8, None, 10), Retention(0, 8, 80)], [80, 80, 10, 10]),  # in any order
        ([Retention(3, 9, 50)], [35, 50, 50, 35]),  # a block goes by its first token
        ([Retention(1, 4, 50)], [35, 35, 35, 35]),  # no first token in it
        ([Retention(4, 5, 100), Retention(12, 99, 0)], [35, 100, 35, 0]),
    ],
)
def test_blocks_take_the_level_of_their_first_token(cache, ns, run, ranges, expected):
    assert levels(cache, run(cache, range(16), ns, retention=ranges)) == expected


def test_levels_reach_tokens_that_come_later(cache, ns):
    lease = cache.claim(span(0, 4), ns, retention=[Retention(0, 4, 90), Retention(8, None, 20)])
    cache.append(lease, span(4, 16))
    cache.commit(lease, 9)
    cache.commit(lease, 16)
    assert levels(cache, lease) == [90, 35, 20, 20]


def test_a_head_waits_for_its_tail_whatever_its_level(cache, ns, run, victims):
    run(cache, range(8), ns, retention=[Retention(0, 4, 0), Retention(4, 8, 100)])
    run(cache, range(50, 54), ns)
    assert victims(cache) == [2, 1, 0]


def test_the_last_statement_counts_and_none_leaves_it(cache, ns, run):
    lease = run(cache, range(8), ns, retention=[Retention(0, None, 80)])
    run(cache, range(9), ns)
    assert levels(cache, lease) == [80, 80]
    run(cache, range(9), ns, retention=[Retention(4, None, 20)])
    assert levels(cache, lease) == [80, 20]
    run(cache, range(8), ns, read=False, retention=[Retention(0, 4, 60)])  # stores the same again
    assert levels(cache, lease) == [60, 20]


def test_a_level_for_a_time(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=2)
    run(cache, [1, 1, 1, 1], ns, retention=[Retention(0, None, 80, 60.0)])
    for clock.now, start in ((30.0, 100), (59.9, 200)):
        assert run(cache, range(start, start + 4), ns).blocks.tolist() == [1], "the younger one goes"
    clock.now = 60.1
    assert run(cache, range(300, 304), ns).blocks.tolist() == [0]


def test_a_low_level_for_a_time_ends_too(make_cache, ns, run, clock, victims):
    cache = make_cache(num_blocks=3)
    run(cache, [1, 1, 1, 1], ns)
    clock.now = 10.0
    lease = run(cache, [2, 2, 2, 2], ns, retention=[Retention(0, None, 5, 60.0)])
    assert victims(cache) == [1, 0]
    clock.now = 70.1
    run(cache, [3, 3], ns)  # whoever takes blocks looks at the time first
    assert victims(cache) == [0, 1] and levels(cache, lease) == [35]


def test_the_age_of_the_next_victim_is_that_after_the_end_of_a_level(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=3)
    run(cache, [1, 1, 1, 1], ns, retention=[Retention(0, None, 80, 60.0)])
    clock.now = 10.0
    run(cache, [2, 2, 2, 2], ns)
    ages = []
    for clock.now in (50.0, 70.0):
        ages.append(cache.stats().eviction_age_s)
    assert ages == [40.0, 70.0]


def test_a_hit_counts_the_time_anew(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=4)
    keep = [Retention(0, None, 80, 60.0)]
    lease = run(cache, [1, 1, 1, 1], ns, retention=keep)
    clock.now = 50.0
    run(cache, [1, 1, 1, 1, 0], ns, retention=keep)
    found = []
    for clock.now in (61.0, 109.9, 110.1):
        run(cache, [9], ns)
        found += levels(cache, lease)
    assert found == [80, 80, 35]


def test_a_level_without_end_takes_the_deadline_away(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=4)
    lease = run(cache, [1, 1, 1, 1], ns, retention=[Retention(0, None, 80, 60.0)])
    run(cache, [1, 1, 1, 1, 0], ns, retention=[Retention(0, None, 70)])
    clock.now = 1000.0
    run(cache, [9], ns)
    assert levels(cache, lease) == [70]


def test_a_level_ends_while_the_block_is_held(make_cache, ns, clock, victims):
    cache = make_cache(num_blocks=4)
    lease = cache.claim(span(0, 4), ns, retention=[Retention(0, None, 80, 60.0)])
    cache.commit(lease, 4)
    clock.now = 61.0
    other = cache.claim(span(50, 54), ns)
    cache.commit(other, 4)
    assert levels(cache, lease) == [35]
    cache.release(lease)
    cache.release(other)
    assert victims(cache) == [0, 1]
    cache.check()


def test_a_deadline_of_what_was_there_before_means_nothing(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=1)
    run(cache, [1, 1, 1, 1], ns, retention=[Retention(0, None, 5, 60.0)])
    clock.now = 1.0
    lease = run(cache, [2, 2, 2, 2], ns, retention=[Retention(0, None, 80)])
    assert lease.blocks.tolist() == [0]
    cache._state.pool = cache._state._retentions.expire(cache._state.pool, 61.0)
    assert levels(cache, lease) == [80]


def test_a_new_block_begins_at_the_default(make_cache, ns, run):
    cache = make_cache(num_blocks=1)
    run(cache, [1, 1, 1, 1], ns, retention=[Retention(0, None, 90)])
    assert levels(cache, run(cache, [2, 2, 2, 2], ns)) == [35]


def test_forks_keep_their_prompts_retention(cache, ns):
    lease = cache.claim(span(0, 4), ns, retention=[Retention(0, 4, 90), Retention(4, None, 10)])
    cache.commit(lease, 4)
    fork = cache.fork(lease)
    cache.append(fork, span(4, 8))
    cache.commit(fork, 8)
    assert levels(cache, fork) == [90, 10]


def test_members_of_a_batch_have_their_own(cache, ns):
    keep = (Retention(0, None, 50),)
    leases = cache.claim_many([Prompt(span(0, 4), ns, retention=keep), Prompt(span(50, 54), ns)])
    for lease in leases:
        cache.commit(lease, 4)
    assert [levels(cache, lease) for lease in leases] == [[50], [35]]


def test_deadlines_that_are_replaced_do_not_pile_up(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=4)
    for _ in range(500):
        clock.now += 1.0
        run(cache, [1, 1, 1, 1, 0], ns, retention=[Retention(0, None, 80, 1e6)])
    assert len(cache._state._retentions._line) <= 66


WRONG = [(-1, 4, 50), (4, 4, 50), (5, 4, 50), (0, 4, 101), (0, 4, -1)]
WRONG += [(0, 4, 50, 0.0), (0, 4, 50, -1.0), (0, None, 50, math.nan)]
# What would fail amid a claim, when blocks are held already.
WRONG += [(0.5, None, 50), (0, 4.5, 50), (0, 4, 50.5), (None, 4, 50), ("0", 4, 50), (0, 4, None)]
WRONG += [(0, 4, 50, "1"), (0, 4, 50, 10**400)]


@pytest.mark.parametrize("wrong", WRONG)
def test_impossible_ranges_are_refused(wrong):
    with pytest.raises(InvalidRequest):
        Retention(*wrong)


@pytest.mark.parametrize(
    "ranges",
    [
        [Retention(0, 5, 50), Retention(4, 8, 60)],
        [Retention(4, 8, 60), Retention(0, 5, 50)],
        [Retention(0, None, 50), Retention(4, 8, 60)],
        [Retention(0, 9, 50), Retention(0, 9, 50)],
    ],
)
def test_ranges_that_overlap_are_refused(cache, ns, ranges):
    with pytest.raises(InvalidRequest, match="overlap at token"):
        cache.claim(span(0, 8), ns, retention=ranges)
    assert cache.stats().free == 8 and cache.stats().claims == 0
