"""Waiting work from two sources that must never count twice, and the ages that steer eviction."""

import math

import numpy as np
import pytest

from router.loads import MEASURED_TOKENS, Loads


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def one(rate=100.0):
    """One replica "a" at slot 0 whose reported rate is `rate` tokens/s."""
    clock = Clock()
    loads = Loads(clock, transit_s=0.05)
    loads.resize(64)
    loads.join("a", 0)
    loads.report("a", 0, report(rate=rate))
    return clock, loads


def report(tokens=0, waiting=0, running=0, rate=100.0, **other):
    return {
        "waiting": waiting, "running": running, "waiting_tokens": tokens, "free": 0, "cached": 10,
        "held": 0, "num_blocks": 10, "eviction_age_s": None, "prefill_tokens_per_s": rate,
        "decode_step_s": 0.02, **other,
    }  # fmt: skip


def wait(loads, now):
    return loads.wait_work(now)[0]


def test_others_work_shrinks_at_the_reported_rate():
    _, loads = one()
    loads.report("a", 0, report(tokens=300))
    assert [wait(loads, t) for t in (0.0, 1.0, 3.0, 9.0)] == [300.0, 200.0, 0.0, 0.0]


def test_own_requests_count_at_once_and_only_the_oldest_shrinks():
    clock, loads = one()
    for tokens in (200, 500):
        loads.ledger.reserve("a", None, tokens, 0, clock.now)
    assert [wait(loads, t) for t in (0.0, 1.0, 2.0, 50.0)] == [700.0, 600.0, 500.0, 500.0]


def test_a_report_that_contains_our_requests_does_not_count_them_again():
    clock, loads = one()
    loads.ledger.reserve("a", None, 400, 0, clock.now)
    clock.now = 1.0
    loads.report("a", 0, report(tokens=700, waiting=2))
    assert wait(loads, 1.0) == 700.0
    assert loads.requests()[0] == 2.0
    assert loads.others_work[0] == 300.0


def test_a_report_below_our_queue_is_progress_on_the_oldest_request():
    clock, loads = one()
    first = loads.ledger.reserve("a", None, 400, 0, clock.now)
    loads.ledger.reserve("a", None, 100, 0, clock.now)
    clock.now = 1.0
    loads.report("a", 0, report(tokens=250, waiting=2))  # faster than it claims: 250 of 400 done
    assert wait(loads, 1.0) == 250.0
    assert wait(loads, 2.0) == 150.0
    loads.ledger.start(first, "a", 0, None, 0)
    assert wait(loads, 1.0) == 100.0


def test_a_request_in_transit_is_neither_progress_nor_others_work():
    clock, loads = one()
    clock.now = 1.0
    loads.ledger.reserve("a", None, 400, 0, clock.now)
    clock.now = 1.02
    loads.report("a", 0, report(tokens=0))  # built before the request arrived
    assert wait(loads, 1.02) == 400.0
    loads.report("a", 0, report(tokens=400, waiting=1))  # built after
    assert wait(loads, 1.02) == 400.0
    assert loads.requests()[0] == 1.0


def test_others_work_before_ours_is_done_first_and_settles_with_our_start():
    clock, loads = one()
    loads.report("a", 0, report(tokens=300, waiting=1))
    reservation = loads.ledger.reserve("a", None, 200, 0, clock.now)
    assert [wait(loads, t) for t in (0.0, 4.0, 5.0, 9.0)] == [500.0, 100.0, 0.0, 0.0]
    clock.now = 4.0
    loads.ledger.start(reservation, "a", 0, None, 0)
    assert wait(loads, 4.0) == 0.0


def test_an_idle_spell_is_no_work_done_in_advance():
    clock, loads = one()
    clock.now = 100.0
    loads.ledger.reserve("a", None, 400, 0, clock.now)
    assert wait(loads, 100.0) == 400.0


def test_speed_of_replicas_that_did_not_report_is_that_of_the_last_report():
    clock = Clock()
    loads = Loads(clock)
    loads.resize(64)
    for slot, name in enumerate("abc"):
        loads.join(name, slot)
    loads.report("a", 0, report(rate=500.0))
    loads.report("b", 1, report(rate=0.0))
    loads.join("d", 3)
    assert loads.rate[:4].tolist() == [500.0] * 4
    loads.report("b", 1, report(rate=50.0))
    assert loads.rate[:4].tolist() == [500.0, 50.0, 50.0, 50.0]
    assert loads.token_s[1] == 0.02


def test_a_partial_report_is_taken_for_what_it_says():
    _, loads = one()
    loads.report("a", 0, {"waiting_tokens": 30})
    assert wait(loads, 0.0) == 30.0


def ages(loads, blocks, now=0.0):
    return loads.victim_ages(np.array([0]), np.array([float(blocks)]), now)[0]


def test_free_blocks_are_infinitely_old_until_they_are_spoken_for():
    _, loads = one()
    loads.report("a", 0, report(free=10, num_blocks=100, eviction_age_s=50.0))
    assert ages(loads, 10) == math.inf
    assert ages(loads, 11) == 50.0
    loads.sent(0, 5, 0.0)
    assert ages(loads, 5) == math.inf
    assert ages(loads, 6) == 50.0


def test_ages_grow_with_time_and_shrink_with_what_is_sent():
    _, loads = one()
    loads.report("a", 0, report(free=0, num_blocks=100, eviction_age_s=50.0))
    assert ages(loads, 1, now=10.0) == 60.0
    loads.sent(0, 25, 0.0)
    assert ages(loads, 1, now=10.0) == 45.0
    loads.sent(0, 500, 0.0)
    assert ages(loads, 1) == 0.0
    loads.report("a", 0, report(free=0, num_blocks=100, eviction_age_s=None))
    assert ages(loads, 1) == math.inf


@pytest.mark.parametrize("capacity", [64, 128])
def test_resizing_keeps_what_is_known(capacity):
    _, loads = one(rate=250.0)
    loads.ledger.reserve("a", None, 77, 0, 0.0)
    loads.resize(128)
    loads.resize(capacity)
    assert len(loads.rate) == len(loads.ledger.outstanding) == capacity
    assert (loads.rate[0], wait(loads, 0.0)) == (250.0, 77.0)


def test_a_rate_from_the_warm_up_alone_is_nobodys_advantage():
    clock, loads = one(rate=100.0)
    loads.join("b", 1)
    loads.join("c", 2)
    loads.report("b", 1, report(rate=900.0, measured_tokens=256))
    assert loads.rate[:3].tolist() == [100.0, 100.0, 100.0], "a has measured its own"
    loads.report("b", 1, report(rate=800.0, measured_tokens=MEASURED_TOKENS))
    assert loads.rate[:2].tolist() == [100.0, 800.0]
    fresh = Loads(clock)
    fresh.resize(64)
    for slot, rate in enumerate((92.0, 152.0)):
        fresh.join(str(slot), slot)
        fresh.report(str(slot), slot, report(rate=rate, measured_tokens=256))
    assert fresh.rate[0] == fresh.rate[1] == 152.0, "none has: the latest stands for all"


def test_attention_makes_long_contexts_dearer():
    _, loads = one()
    hits = np.zeros(64, np.int64)
    hits[0] = 600
    assert loads.work(hits, 1000)[0] == 400, "a replica that says nothing counts tokens"
    loads.report("a", 0, report(attention_tokens=2000))
    assert loads.work(hits, 1000)[0] == 400 * (1 + 800 / 2000)
    loads.join("b", 1)
    assert loads.work(hits, 1000)[1] == 1000 * (1 + 500 / 2000), "a new one is like the last that said"


def test_work_is_what_is_counted_where_it_is_told():
    clock, loads = one()
    loads.ledger.reserve("a", None, 400, 0, clock.now, work=600)
    assert wait(loads, 0.0) == 600
    clock.now = 1.0
    loads.report("a", 0, report(tokens=700, waiting=2, waiting_work=900))
    assert (wait(loads, 1.0), loads.others_work[0]) == (900.0, 300.0)


def test_queued_are_our_own_and_what_a_report_shows_beyond_them():
    clock, loads = one()
    first, _ = (loads.ledger.reserve("a", None, 100, 0, clock.now, choices=n) for n in (1, 2))
    assert loads.queued()[0] == 3.0
    loads.ledger.start(first, "a", 0, 1, 1)
    assert (loads.queued()[0], loads.requests()[0]) == (2.0, 3.0)
    loads.report("a", 0, report(waiting=6, running=2))
    assert (loads.queued()[0], loads.requests()[0]) == (6.0, 8.0)
    loads.report("a", 0, report(waiting=1, running=2))
    assert (loads.queued()[0], loads.requests()[0]) == (2.0, 3.0)


def test_room_is_what_is_free_and_not_spoken_for():
    clock, loads = one()
    loads.report("a", 0, report(free=5))
    assert [loads.has_room(np.full(64, n))[0] for n in (5.0, 5.1)] == [True, False]
    loads.sent(0, 2, clock.now)
    assert [loads.has_room(np.full(64, n))[0] for n in (3.0, 4.0)] == [True, False]
