"""The default policy: who gets a request, by cost, age and load, and when a prefix gets another copy."""

from collections import Counter

import numpy as np
import pytest

from tests.router.placements import load, placement_of, prompt, snapshot


def test_equal_replicas_share_misses_and_hits_equally():
    for policy in ("cache_aware", "least_load"):
        placement, hashes = placement_of(4, policy), prompt(10)
        for i in range(4):
            placement.update(f"r{i}", snapshot(hashes), load())
        for asked in (hashes, prompt(10, 1)):
            shares = Counter()
            for _ in range(400):
                decision = placement.place(asked, 170)
                placement.finish(decision.reservation)
                shares[decision.replica_id] += 1
            assert set(shares) == {"r0", "r1", "r2", "r3"}
            assert min(shares.values()) > 60


def test_misses_go_where_the_next_victim_is_oldest_and_follow_what_was_sent():
    placement = placement_of(3)
    for name, age in (("r0", 100.0), ("r1", 120.0), ("r2", 50.0)):
        placement.update(name, None, load(eviction_age_s=age))
    reasons, shares = Counter(), Counter()
    for i in range(30):
        decision = placement.place(prompt(5, i), 80)
        placement.finish(decision.reservation)
        shares[decision.replica_id] += 1
        reasons[decision.reason] += 1
    # Ages fall with what was sent until all three are equally young, so r1 gets most and r2 least.
    assert shares["r1"] > shares["r0"] > shares["r2"]
    assert reasons["age"] > 20


def test_free_blocks_come_before_any_victim():
    placement = placement_of(2)
    placement.update("r0", None, load(eviction_age_s=1000.0))
    placement.update("r1", None, load(eviction_age_s=1.0, free=50))
    assert placement.place(prompt(20), 330).replica_id == "r1"


def test_a_faster_replica_takes_more():
    placement = placement_of(2)
    placement.update("r0", None, load(prefill_tokens_per_s=3000.0, eviction_age_s=None))
    placement.update("r1", None, load(prefill_tokens_per_s=1000.0, eviction_age_s=None))
    shares = Counter(placement.place(prompt(5, i), 1000).replica_id for i in range(60))
    assert shares["r0"] > 1.5 * shares["r1"]
    assert shares["r1"] > 5


def test_a_saturated_favourite_spills_at_once():
    placement, hashes = placement_of(2), prompt(60)
    placement.update("r0", snapshot(hashes), load(waiting=5, running=5, waiting_tokens=1100))
    placement.update("r1", None, load())
    decision = placement.place(hashes, 970)  # waiting takes 1.1 s, computing it on the idle peer 0.97 s
    assert (decision.replica_id, decision.reason, decision.best_tokens) == ("r1", "load", 960)
    assert (placement.counters.not_best, placement.counters.lost_tokens) == (1, 960)


def test_a_short_queue_does_not_scare_the_favourite_away():
    placement, hashes = placement_of(2), prompt(60)
    placement.update("r0", snapshot(hashes), load(waiting=1, running=2, waiting_tokens=500))
    placement.update("r1", None, load(running=1))
    assert placement.place(hashes, 970).replica_id == "r0"


def test_one_hot_replica_does_not_switch_affinity_off_for_the_others():
    placement, hot, cold = placement_of(3), prompt(60), prompt(60, 1)
    placement.update("r0", snapshot(hot), load(waiting=50, running=50, waiting_tokens=100_000))
    placement.update("r1", snapshot(cold), load())
    assert placement.place(cold, 970).replica_id == "r1"
    assert placement.place(hot, 970).replica_id != "r0"


def test_a_burst_for_a_new_prefix_lands_on_few_replicas():
    placement, prefix = placement_of(64), prompt(250)
    for i in range(64):
        placement.update(f"r{i}", None, load(prefill_tokens_per_s=8000.0, decode_step_s=0.02))
    placed = [placement.place(np.concatenate([prefix, prompt(2, 9 + i)]), 4040) for i in range(200)]
    replicas = Counter(d.replica_id for d in placed)
    assert len(replicas) == 7
    assert sum(d.predicted_tokens == 0 for d in placed) == 7, "each computes the prefix once"


def test_among_holders_the_one_with_fewer_requests_decodes():
    placement, hashes = placement_of(2), prompt(20)
    for name, running in (("r0", 9), ("r1", 2)):
        placement.update(name, snapshot(hashes), load(running=running))
    assert placement.place(hashes, 325).replica_id == "r1"


def test_a_prefill_stays_away_from_those_who_wait_for_their_first_token():
    placement = placement_of(2)
    placement.update("r0", None, load(running=1, waiting=1))
    placement.update("r1", None, load(running=2))
    (best, other) = placement.place(prompt(20), 320).candidates()
    assert best.replica_id == "r1"
    assert other.cost_s - best.cost_s == pytest.approx(0.2 * 0.32)


def test_a_copy_that_is_there_is_better_than_one_that_is_coming():
    placement, hashes = placement_of(2), prompt(20)
    placement.update("r1", None, load())
    placement.update("r0", None, load(running=1, waiting=1, waiting_tokens=9000))
    assert placement.place(hashes, 325).replica_id == "r1", "it computes the prefix now"
    placement.update("r0", snapshot(hashes), load(running=2))
    # Little to compute either way, but here another 0.325 s must pass until the prefix is computed, and the
    # 0.32 s of it that are ready there count once more.
    ready, coming = placement.place(hashes, 325).candidates()
    assert (ready.replica_id, coming.replica_id) == ("r0", "r1")
    assert coming.wait_s == pytest.approx(0.325)
    assert coming.cost_s - ready.cost_s == pytest.approx(0.325 + 0.32, abs=0.005)


def test_while_a_new_prefix_is_computed_free_idle_replicas_join():
    """Up to eight, fewest requests first; full, busy and late ones do not."""
    placement, prefix = placement_of(12), prompt(20)
    for i in range(12):
        placement.update(f"r{i}", None, load(free=100, cached=0))
    placement.update("r9", None, load(free=3, cached=97))
    placement.update("r10", None, load(free=100, cached=0, waiting=1, waiting_tokens=10))
    siblings = [np.concatenate([prefix, prompt(1, 2 + i)]) for i in range(24)]
    placed = [placement.place(hashes, 337) for hashes in siblings[:8]]
    placement.test_clock.now += 0.1
    placed += [placement.place(hashes, 337) for hashes in siblings[8:]]
    assert sorted(Counter(d.replica_id for d in placed).values()) == [3] * 8
    assert not {"r9", "r10"} & {d.replica_id for d in placed}
    assert Counter(d.predicted_tokens for d in placed) == {0: 8, 320: 16}
    late, hashes = placement_of(2), prompt(20)
    for i in range(2):
        late.update(f"r{i}", None, load(free=100, cached=0))
    home = late.place(hashes, 320).replica_id
    late.test_clock.now += 0.2  # of 0.32 s: computing it elsewhere takes more than twice what is left
    assert late.place(hashes, 320).replica_id == home


def test_a_free_replica_takes_a_copy_earlier_than_a_full_one():
    copies = []
    for free in (100, 0):
        placement, hashes = placement_of(4), prompt(20)
        for i in range(4):
            placement.update(f"r{i}", None, load(free=free, cached=100 - free))
        copies.append(len({placement.place(hashes, 325).replica_id for _ in range(12)}))
    assert copies == [4, 1]
