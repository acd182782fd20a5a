"""What the reuse-aware policy learns: classes, typical gaps, bonuses, ghosts."""

import math

import numpy as np
import pytest

from kvcore import habits
from kvcore.blocks import CLASSES


def prompt(name):
    return [ord(name)] * 4 + [0]


def bonuses(cache):
    habits.learn(cache._state.pool)
    return cache._state.pool.habits["bonus"].tolist()


def test_nothing_seen_means_no_bonus(make_cache, ns, run):
    cache = make_cache(policy="reuse")
    run(cache, prompt("A"), ns)
    assert bonuses(cache) == [0.0, 0.0, 0.0]


def test_the_bonus_is_the_log_of_the_chance_times_the_typical_gap(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=16, policy="reuse")
    for clock.now, name in ((0, "A"), (10, "B"), (20, "A"), (50, "A"), (60, "C")):
        run(cache, prompt(name), ns)
    # Gaps of 20 and 30 s; A, B and C were used once, A a second and a third time.
    tau = (20**2 + 30**2) / (20 + 30)
    mean = 2 / 5
    chances = [(1 + mean) / (3 + 1), (1 + mean) / (1 + 1), (0 + mean) / (1 + 1)]
    logs = [tau * math.log(chance) for chance in chances]
    expected = [logs[0], max(logs[:2]), max(logs)]  # more uses never count less
    assert bonuses(cache) == pytest.approx(expected, abs=1e-6)


def test_an_old_pool_has_small_bonuses(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=16, policy="reuse")
    for clock.now, name in ((0, "A"), (10, "A"), (20, "B")):
        run(cache, prompt(name), ns)
    full = bonuses(cache)
    cache._state.pool.state["age_s"] = 40.0  # victims are four times as old as the typical gap of 10 s
    assert bonuses(cache) == pytest.approx([bonus / 4 for bonus in full], abs=1e-6)
    cache._state.pool.state["age_s"] = 5.0
    assert bonuses(cache) == full


def test_a_held_block_that_is_hit_has_no_gap(make_cache, ns, clock):
    cache = make_cache(policy="reuse")
    tokens = np.array(prompt("A"), np.int32)
    first = cache.claim(tokens, ns)
    cache.commit(first, 5)
    clock.now = 100.0
    second = cache.claim(tokens, ns)
    assert cache._state.pool.state["gap_s"][0] == 0.0
    assert cache._state.pool.habits["again"].tolist() == [1.0, 0.0, 0.0]
    cache.release(first)
    cache.release(second)


def test_a_block_that_returns_is_not_new(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=2, policy="reuse")
    for clock.now in (0.0, 5.0):
        run(cache, prompt("A"), ns)
    clock.now = 10.0
    run(cache, [*range(8)], ns)  # evicts it
    clock.now = 30.0
    run(cache, prompt("A"), ns)
    block = (
        cache._state.pool.blocks["hash"]
        .tolist()
        .index(int(cache.hasher.block_hashes(np.array(prompt("A"), np.int32), 4, cache.hasher.root(ns))[0]))
    )
    assert cache._state.pool.blocks["uses"][block] == 3
    assert cache._state.pool.habits["again"].tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(("uses", "number"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (65_535, 2)])
def test_classes(uses, number):
    assert habits.class_of(uses) == number < CLASSES


def test_old_habits_fade(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=4, policy="reuse")
    pool = cache._state.pool
    pool.habits["uses"], pool.habits["again"] = [40.0, 20.0, 5.0], [20.0, 5.0, 5.0]
    pool.state["gap_s"], pool.state["gap_s2"] = 100.0, 1000.0
    before = bonuses(cache)
    assert pool.habits["uses"].tolist() == [20.0, 10.0, 2.5] and pool.habits["again"].tolist() == [
        10.0,
        2.5,
        2.5,
    ]
    assert (pool.state["gap_s"][0], pool.state["gap_s2"][0]) == (50.0, 500.0)
    assert bonuses(cache) != before and pool.habits["uses"].tolist() == [20.0, 10.0, 2.5], "65 uses > 16 x 4"


def test_what_is_used_again_outlives_what_is_not(make_cache, ns, run, victims, clock):
    """Twice-used A is older than once-used Z, and stays: the traffic has shown what that means."""
    cache = make_cache(num_blocks=8, policy="reuse")
    for clock.now in range(0, 400, 10):
        run(cache, [int(clock.now) + 1000] * 4 + [0], ns)  # never seen again
        run(cache, prompt("H"), ns)  # all the time
    run(cache, prompt("A"), ns)
    clock.now = 410.0
    run(cache, prompt("A"), ns)
    clock.now = 412.0
    run(cache, prompt("Z"), ns)
    habits.learn(cache._state.pool)
    order = victims(cache)
    place = {cache._state.pool.tokens[block, 0]: i for i, block in enumerate(order)}
    assert place[ord("Z")] < place[ord("A")]
