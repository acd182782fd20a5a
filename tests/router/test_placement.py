"""Placement: choosing and reserving in one step, limits, membership, and what is believed of replicas."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from kvcore.fingerprint import FingerprintUpdate
from router.errors import ConfigError, NoReplica, QueueFull, RouterError, UnknownPolicy
from router.placement import Placement
from router.policy import policy_names
from tests.router.placements import GEOMETRY, NONE, chunk, load, placement_of, prompt, snapshot


def test_goes_where_the_prefix_is():
    placement, hashes = placement_of(), prompt(20)
    placement.update("r1", snapshot(hashes[:15]), load())
    decision = placement.place(hashes, 325)
    assert (decision.replica_id, decision.predicted_tokens, decision.reason) == ("r1", 240, "prefix")
    assert placement.stats()["r1"] == {
        "queued_requests": 1, "running_requests": 0, "queued_tokens": 85, "running_tokens": 0,
        "in_flight_prompts": 1, "choices": 1,
    }  # fmt: skip
    first, *others = decision.candidates()
    assert (first.replica_id, first.hit_tokens, len(others)) == ("r1", 240, 2)
    assert first.cost_s < others[0].cost_s
    placement.finish(decision.reservation)
    assert not any(any(figures.values()) for figures in placement.stats().values())


def test_a_whole_prompt_hit_still_computes_its_last_token():
    placement, hashes = placement_of(), prompt(4)
    placement.update("r2", snapshot(hashes), load())
    assert placement.place(hashes, 64).predicted_tokens == 63


def test_the_next_request_for_a_prompt_in_flight_follows_it():
    placement, hashes = placement_of(), prompt(20)
    first = placement.place(hashes, 330)
    second = placement.place(np.concatenate([hashes, prompt(5, 1)]), 400)
    assert second.replica_id == first.replica_id
    assert (second.predicted_tokens, second.reason) == (320, "in_flight_prefix")
    private = placement.place(prompt(9, 3), 150, publish=False)
    assert placement.place(prompt(9, 3), 150).predicted_tokens == 0
    assert private.predicted_tokens == 0


def test_excluded_replicas_get_nothing():
    placement, hashes = placement_of(), prompt(20)
    placement.update("r1", snapshot(hashes), load())
    decision = placement.place(hashes, 320, exclude=frozenset({"r1", "unknown"}))
    assert decision.replica_id in ("r0", "r2")
    last = placement.place(hashes, 320, exclude=frozenset({"r1", "r0"}))
    assert (last.replica_id, last.reason) == ("r2", "only_replica")
    with pytest.raises(NoReplica, match="excluded"):
        placement.place(hashes, 320, exclude=frozenset({"r0", "r1", "r2"}))
    with pytest.raises(NoReplica, match="known"):
        placement_of(0).place(hashes, 320)


def test_every_choice_of_a_request_is_load():
    placement = placement_of(2, "least_load", max_inflight_per_replica=4)
    for name in ("r0", "r1"):
        placement.update(name, None, load())
    first = placement.place(NONE, 100, choices=5)
    others = [placement.place(NONE, 100) for _ in range(4)]  # none where five choices are drawn
    assert {d.replica_id for d in others} == {"r0", "r1"} - {first.replica_id}
    with pytest.raises(QueueFull):
        placement.place(NONE, 10)
    assert placement.stats()[first.replica_id] == {
        "queued_requests": 1, "running_requests": 0, "queued_tokens": 100, "running_tokens": 0,
        "in_flight_prompts": 0, "choices": 5,
    }  # fmt: skip
    # The replica counts its sequences: what it reports of these five is not other routers' work.
    placement.update(first.replica_id, None, load(waiting=4, running=1, waiting_tokens=100))
    slot = placement.fingerprints.slot(first.replica_id)
    assert (placement.loads.others_requests[slot], placement.loads.requests()[slot]) == (0.0, 5.0)


@pytest.mark.parametrize("policy", policy_names())
def test_limits_are_kept_and_a_full_fleet_says_when_to_come_back(policy):
    placement = placement_of(2, policy, max_inflight_per_replica=3)
    for name in ("r0", "r1"):
        placement.update(name, None, load())
    placed = [placement.place(NONE, 5000) for _ in range(6)]
    assert Counter(d.replica_id for d in placed) == {"r0": 3, "r1": 3}
    with pytest.raises(QueueFull) as full:
        placement.place(NONE, 10)
    assert full.value.retry_after_s == 15.0  # three times 5,000 tokens at 1,000 tokens/s
    assert placement.counters.queue_full == 1
    placement.finish(placed[4].reservation)
    assert placement.place(NONE, 10).replica_id == placed[4].replica_id


@pytest.mark.parametrize("policy", policy_names())
def test_empty_prompts_and_prompts_without_full_blocks_are_placed(policy):
    placement = placement_of(policy=policy)
    for tokens in (0, 1, 5):
        decision = placement.place(NONE, tokens)
        assert decision.predicted_tokens == 0
        placement.finish(decision.reservation)
    assert not any(any(figures.values()) for figures in placement.stats().values())


def test_round_robin_rotates_strictly_over_who_is_there():
    placement = placement_of(4, "round_robin")

    def go(n, **kw):
        return [placement.place(NONE, 100, **kw).replica_id for _ in range(n)]

    assert go(5) == ["r0", "r1", "r2", "r3", "r0"]
    placement.leave("r2")
    assert go(4) == ["r1", "r3", "r0", "r1"]
    assert go(1, exclude=frozenset({"r3"})) == ["r0"]
    assert placement.place(NONE, 1).reason == "round_robin"


def test_least_load_takes_the_fewest_requests_of_all_routers_then_tokens():
    placement = placement_of(3, "least_load")
    placement.update("r0", None, load(waiting=1, running=2))
    placement.update("r1", None, load(running=1, waiting_tokens=500))
    placement.update("r2", None, load(running=1))
    assert [placement.place(NONE, 100).replica_id for _ in range(2)] == ["r2", "r1"]


def test_membership():
    placement, hashes = placement_of(1), prompt(10)
    placement.join("r0")  # again: nothing changes
    placement.update("r0", snapshot(hashes), load())
    assert placement.place(hashes, 170).predicted_tokens == 160
    placement.leave("r0")
    placement.leave("r0")
    assert (placement.stats(), placement.replica_ids) == ({}, [])
    assert placement.update("r0", snapshot(hashes), load()) is False
    assert not placement.needs_resync("r0")
    placement.join("r0")
    decision = placement.place(hashes, 170)
    assert decision.predicted_tokens == 0


def test_requests_at_a_lost_replica_end_without_a_trace():
    placement = placement_of(2)
    decisions = [placement.place(NONE, 100) for _ in range(8)]
    placement.leave("r0")
    placement.join("other")  # takes the slot of r0
    for decision in decisions:
        placement.on_start(decision, chunk(decision.replica_id, 0))
        placement.finish(decision.reservation)
    assert not any(any(figures.values()) for figures in placement.stats().values())


def test_churn_leaves_nothing():
    placement = placement_of(1)
    for i in range(1000):
        placement.join(f"x{i}")
        decision = placement.place(prompt(3, i), 50)
        if i >= 5:
            placement.leave(f"x{i - 5}")
        placement.on_start(decision, chunk(decision.replica_id, 0))
        placement.finish(decision.reservation)
    assert placement.fingerprints.capacity == len(placement.loads.rate) == 64
    assert len(placement.stats()) == 6
    assert not any(any(figures.values()) for figures in placement.stats().values())


def test_grows_over_many_words_and_back():
    placement, hashes = placement_of(300), prompt(10)
    placement.update("r299", snapshot(hashes), load())
    assert placement.place(hashes, 170).replica_id == "r299"
    for i in range(299):
        placement.leave(f"r{i}")
    assert placement.place(hashes, 170).replica_id == "r299"
    placement.leave("r299")
    placement.join("new")
    assert placement.place(hashes, 170).replica_id == "new"


def test_a_start_elsewhere_moves_the_figures():
    placement = placement_of(2)
    decision = placement.place(prompt(5), 90)
    other = {"r0": "r1", "r1": "r0"}[decision.replica_id]
    placement.on_start(decision.reservation, chunk(other, 0))
    assert placement.stats()[decision.replica_id]["running_requests"] == 0
    assert placement.stats()[other]["running_requests"] == 1


def test_the_overlay_gives_way_to_the_fingerprint():
    placement, hashes = placement_of(1), prompt(10)
    placement.update("r0", snapshot(NONE, seq=3), load())
    decision = placement.place(hashes, 170)
    placement.on_start(decision, chunk("r0", 0, seq=5))
    assert placement.place(hashes, 170).predicted_tokens == 160
    placement.update("r0", snapshot(hashes[:4], seq=5))  # stored, and part of it evicted again
    assert placement.stats()["r0"]["in_flight_prompts"] == 1  # the second request's
    late = placement.place(prompt(4, 7), 80)
    placement.on_start(late, chunk("r0", 0, seq=5))
    assert placement.stats()["r0"]["in_flight_prompts"] == 1


def test_the_prompt_of_a_request_that_has_ended_is_known_before_the_fingerprint_shows_it():
    placement, hashes = placement_of(2), prompt(10)
    for name in ("r0", "r1"):
        placement.update(name, snapshot(NONE, seq=3), load())
    first = placement.place(hashes, 170)
    placement.on_start(first, chunk(first.replica_id, 0, seq=5))
    placement.finish(first.reservation)
    again = placement.place(hashes, 170)
    assert (again.replica_id, again.predicted_tokens) == (first.replica_id, 160)


def test_without_a_fingerprint_nothing_of_a_request_stays_after_its_end():
    placement, hashes = placement_of(1), prompt(10)
    placement.update("r0", None, load())
    decision = placement.place(hashes, 170)
    placement.on_start(decision, chunk("r0", 0, seq=5))
    placement.finish(decision.reservation)
    assert len(placement.ledger.in_flight) == 0
    assert placement.place(hashes, 170).predicted_tokens == 0


def test_without_a_fingerprint_the_end_of_a_request_says_nothing_of_others():
    placement, hashes = placement_of(1), prompt(10)
    placement.update("r0", None, load())
    first, second = placement.place(hashes, 170), placement.place(prompt(10, 2), 170)
    for seq, decision in ((5, first), (6, second)):
        placement.on_start(decision, chunk("r0", 0, seq=seq))
    placement.finish(second.reservation)
    assert placement.place(hashes, 170).predicted_tokens == 160


def test_prompts_of_a_replicas_last_life_are_cold_at_once():
    placement, lost = placement_of(1), prompt(10)
    placement.update("r0", snapshot(NONE, seq=3), load())
    old, new = placement.place(lost, 170), placement.place(prompt(10, 2), 170)
    placement.on_start(old, chunk("r0", 0, seq=5))
    placement.finish(old.reservation)
    placement.on_start(new, chunk("r0", 0, epoch=2, seq=1))
    assert placement.place(lost, 170).predicted_tokens == 0
    assert placement.place(prompt(10, 2), 170).predicted_tokens == 160


def test_a_replica_that_answers_from_another_epoch_is_cold_at_once():
    placement, hashes = placement_of(1), prompt(10)
    placement.update("r0", snapshot(hashes), load())
    assert not placement.needs_resync("r0")
    decision = placement.place(hashes, 170)
    placement.on_start(decision, chunk("r0", 0, epoch=2))
    placement.finish(decision.reservation)
    assert placement.needs_resync("r0")
    assert placement.place(hashes, 170).predicted_tokens == 0


def test_broken_promises_make_a_replica_suspect_until_a_snapshot():
    placement, hashes = placement_of(1), prompt(10)
    placement.update("r0", snapshot(hashes), load())

    def ask(cached):
        decision = placement.place(hashes, 170)
        placement.on_start(decision, chunk("r0", cached))
        placement.finish(decision.reservation)
        return placement.needs_resync("r0")

    assert [ask(cached) for cached in (160, 0, 0, 160, 0, 0)] == [False] * 6
    assert ask(0) is True
    assert placement.counters.suspected == 1
    assert placement.update("r0", snapshot(hashes, seq=2), load())
    assert not placement.needs_resync("r0")
    assert [ask(150) for _ in range(20)] == [False] * 20  # less than a block short


def test_refused_updates_ask_for_a_snapshot():
    placement, hashes = placement_of(1), prompt(10)
    assert placement.needs_resync("r0")
    update = snapshot(hashes)
    assert placement.update("r0", None, load()) is True
    bad = FingerprintUpdate(1, 0, 1, GEOMETRY, True, update.set_rows, update.digest ^ 1)
    assert placement.update("r0", bad, load()) is False
    assert placement.counters.refused_updates == 1
    assert placement.needs_resync("r0")
    assert placement.update("r0", update, load()) is True
    assert placement.knowledge()["r0"].mismatches == 1


def test_wrong_settings_are_named():
    with pytest.raises(UnknownPolicy, match="cache_aware, least_load, round_robin") as error:
        Placement("hottest")
    assert isinstance(error.value, RouterError)
    with pytest.raises(ConfigError, match="max_inflight"):
        Placement(max_inflight_per_replica=0)
    placement = Placement()
    placement.join("r0")
    with pytest.raises(ConfigError, match="block size"):
        placement.place(prompt(2), 40)
    placement.block_size = 16
    assert placement.place(prompt(2), 40).replica_id == "r0"


def test_decisions_are_compiled_once_for_all():
    """In a process of its own, where nothing is compiled yet: the first real decisions compile no more."""
    script = """if True:
        import numpy as np
        from router.fingerprints import _descend
        from router.inflight import _deepen
        from router.placement import Placement, compile_decisions

        compile_decisions()
        print(len(_descend.signatures), len(_deepen.signatures))
        placement = Placement(block_size=16)
        for i in range(65):
            placement.join(str(i))
        for hashes in (np.arange(40, dtype=np.uint64)[::2], np.frombuffer(bytes(80), dtype="<u8")):
            for _ in range(2):
                placement.place(hashes, 16 * len(hashes) + 1)
        print(len(_descend.signatures), len(_deepen.signatures))
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["1"] * 4
