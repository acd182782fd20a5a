"""The ledger's figures are exact, whatever order things end in."""

import random
from dataclasses import asdict

import numpy as np
import pytest

from router.ledger import Ledger, LedgerStats

HASHES = np.arange(1, 9, dtype=np.uint64)
IDLE = LedgerStats(0, 0, 0, 0, 0, 0)


def ledger_of(*names):
    ledger = Ledger()
    for slot, name in enumerate(names):
        ledger.join(name, slot)
    return ledger


def test_figures_from_reservation_to_end():
    ledger = ledger_of("a", "b")
    reservation = ledger.reserve("b", HASHES, 130, 48)
    assert ledger.stats("b") == LedgerStats(1, 0, 82, 0, 1, 1)
    assert (reservation.replica_id, reservation.miss_tokens) == ("b", 82)
    ledger.start(reservation, "b", 64, epoch=1, seq=5)
    assert ledger.stats("b") == LedgerStats(0, 1, 0, 130, 1, 1)
    assert reservation.cached_tokens == 64
    ledger.finish(reservation)
    assert ledger.stats("a") == ledger.stats("b") == IDLE
    assert reservation.replica_id is None


def test_choices_share_the_prompt_but_not_the_decoding():
    ledger = ledger_of("a", "b")
    reservation = ledger.reserve("a", HASHES, 130, 48, choices=4)
    assert ledger.stats("a") == LedgerStats(1, 0, 82, 0, 1, 4)
    ledger.start(reservation, "b", 64, epoch=1, seq=5)
    assert (ledger.stats("a"), ledger.stats("b")) == (IDLE, LedgerStats(0, 1, 0, 4 * 130, 1, 4))
    ledger.finish(reservation)
    assert ledger.stats("b") == IDLE


def test_finish_before_the_start_and_twice():
    ledger = ledger_of("a")
    reservation = ledger.reserve("a", HASHES, 100, 0)
    for _ in range(3):
        ledger.finish(reservation)
    ledger.start(reservation, "a", 0, 1, 1)
    assert ledger.stats("a") == IDLE
    assert not ledger.outstanding.any()


def test_a_start_elsewhere_moves_the_reservation():
    ledger = ledger_of("a", "b")
    reservation = ledger.reserve("a", HASHES, 100, 0)
    ledger.start(reservation, "b", 0, 1, 3)
    assert ledger.stats("a") == IDLE
    assert ledger.stats("b") == LedgerStats(0, 1, 0, 100, 1, 1)
    depth = np.zeros(64, dtype=np.int64)
    ledger.in_flight.deepen(HASHES, depth)
    assert depth[:2].tolist() == [0, 8]
    ledger.finish(reservation)
    assert ledger.stats("b") == IDLE


def test_a_start_on_a_replica_that_is_gone_ends_the_reservation():
    ledger = ledger_of("a")
    reservation = ledger.reserve("a", HASHES, 100, 0)
    ledger.start(reservation, "gone", 0, 1, 3)
    assert (ledger.stats("a"), reservation.replica_id, len(ledger.in_flight)) == (IDLE, None, 0)


def test_a_repeated_start_counts_once():
    ledger = ledger_of("a")
    reservation = ledger.reserve("a", HASHES, 100, 0)
    for _ in range(2):
        ledger.start(reservation, "a", 0, 1, 3)
    assert ledger.stats("a") == LedgerStats(0, 1, 0, 100, 1, 1)


def test_a_dropped_replica_takes_its_figures_along_and_a_new_one_in_its_slot_starts_at_zero():
    ledger = ledger_of("a")
    queued, running = (ledger.reserve("a", HASHES, 100, 0) for _ in range(2))
    ledger.start(running, "a", 0, 1, 1)
    ledger.drop_replica("a")
    ledger.join("new", 0)
    fresh = ledger.reserve("new", HASHES, 50, 0)
    ledger.finish(queued)
    ledger.finish(running)
    ledger.start(queued, "new", 0, 1, 1)
    assert ledger.stats("new") == LedgerStats(1, 0, 50, 0, 1, 1)
    ledger.finish(fresh)
    assert ledger.stats("new") == IDLE
    with pytest.raises(KeyError):
        ledger.stats("a")
    ledger.drop_replica("a")  # unknown: ignored


def test_the_overlay_lasts_until_the_fingerprint_contains_the_prompt():
    ledger = ledger_of("a")
    early, late, waiting, old = (ledger.reserve("a", HASHES, 100, 0) for _ in range(4))
    ledger.start(early, "a", 0, epoch=2, seq=10)
    ledger.start(late, "a", 0, epoch=2, seq=20)
    ledger.start(old, "a", 0, epoch=1, seq=99)
    ledger.stored("a", 2, 15)
    assert ledger.stats("a").in_flight_prompts == 2  # late and waiting; old died with its epoch
    ledger.stored("a", 2, 20)
    assert ledger.stats("a").in_flight_prompts == 1
    ledger.stored("gone", 2, 20)
    for reservation in (early, late, waiting, old):
        ledger.finish(reservation)
    assert ledger.stats("a") == IDLE
    assert len(ledger.in_flight) == 0


def test_prompts_that_are_not_published_stay_out_of_the_overlay():
    ledger = ledger_of("a")
    ledger.reserve("a", None, 100, 0)
    ledger.reserve("a", HASHES[:0], 5, 0)
    assert len(ledger.in_flight) == 0


def test_the_oldest_queued_request_is_known_and_announced():
    heads = []
    ledger = Ledger(on_head_change=heads.append)
    ledger.join("a", 0)
    first, second, third = (ledger.reserve("a", None, n, 0) for n in (10, 20, 30))
    assert (ledger.head_work[0], heads) == (10, [0])
    ledger.finish(second)
    assert (ledger.head_work[0], heads) == (10, [0])
    ledger.start(first, "a", 0, None, 0)
    assert (ledger.head_work[0], heads) == (30, [0, 0])
    ledger.finish(third)
    assert ledger.head_work[0] == 0


def test_tokens_queued_before_a_moment():
    ledger = ledger_of("a")
    for moment in (1.0, 2.0, 3.0):
        ledger.reserve("a", None, 10, 0, now=moment)
    assert [ledger.queued_before("a", m) for m in (1.0, 1.5, 9.0)] == [0, 10, 30]


def test_ten_thousand_mixed_endings_leave_exact_zeros():
    rng = random.Random(4)
    names = [f"r{i}" for i in range(6)]
    ledger = ledger_of(*names)
    open_, generation, ended = [], 0, 0
    while ended < 10_000:
        action = rng.random()
        if action < 0.4 or not open_:
            tokens = rng.randint(1, 5000)
            hashes = np.array([rng.getrandbits(3) for _ in range(rng.randint(0, 6))], dtype=np.uint64)
            reservation = ledger.reserve(
                rng.choice(names), hashes, tokens, rng.randint(0, tokens - 1), choices=rng.randint(1, 4)
            )
            open_.append(reservation)
        elif action < 0.65:
            elsewhere = rng.random() < 0.1
            reservation = rng.choice(open_)
            name = rng.choice([*names, "gone"]) if elsewhere else reservation.replica_id or names[0]
            ledger.start(reservation, name, 0, rng.randint(1, 2), rng.randint(0, 99))
        elif action < 0.99:
            reservation = open_.pop(rng.randrange(len(open_)))
            for _ in range(rng.choice([1, 1, 1, 2])):
                ledger.finish(reservation)
            ended += 1
        elif action < 0.995:
            ledger.stored(rng.choice(names), rng.randint(1, 2), rng.randint(0, 99))
        else:  # one dies, its slot goes to a new one; requests there end later
            slot = rng.randrange(6)
            ledger.drop_replica(names[slot])
            generation += 1
            names[slot] = f"new{generation}"
            ledger.join(names[slot], slot)
    assert sum(s.queued_requests + s.running_requests for s in map(ledger.stats, names)) <= len(open_)
    for reservation in open_:
        ledger.finish(reservation)
    assert all(not any(asdict(ledger.stats(name)).values()) for name in names)
    for name in ("queued_tokens", "queued_work", "head_work", "outstanding", "queued", "running_tokens"):
        assert not getattr(ledger, name).any(), name
    for name in names:  # what was computed stays known until a fingerprint shows it, or that epoch is over
        ledger.stored(name, 3, 0)
    assert len(ledger.in_flight) == 0


def test_a_prompt_that_was_computed_stays_in_the_overlay_after_its_request_has_ended():
    ledger = ledger_of("a", "b")
    for name, seq in (("a", 5), ("b", 7)):
        reservation = ledger.reserve(name, HASHES, 100, 0)
        ledger.start(reservation, name, 0, epoch=1, seq=seq)
        ledger.finish(reservation)
    unanswered = ledger.reserve("a", HASHES, 100, 0)
    ledger.finish(unanswered)
    assert ledger.stats("a") == ledger.stats("b") == IDLE
    assert len(ledger.in_flight) == 2
    ledger.stored("a", 1, 4)
    assert len(ledger.in_flight) == 2
    ledger.stored("a", 1, 5)
    assert len(ledger.in_flight) == 1
    ledger.drop_replica("b")
    assert len(ledger.in_flight) == 0
