"""Where hit was lost: exact small cases of each class, and an account that always adds up."""

from dataclasses import replace

import numpy as np
import pytest

from router.lab.record import Request
from router.lab.sim.changes import Change
from router.lab.sim.fleet import Fleet, FleetConfig
from router.lab.sim.journal import Journal
from router.lab.sim.losses import CLASSES, Losses
from router.lab.sim.policies import OTHERS, PLACED
from router.lab.sim.sent import SentPrefixes
from router.lab.sim.timing import Timing

SIMPLE = Timing(0.0, 1.0, 0.125, 0.0, 2**-10, max_batch_tokens=32, max_num_seqs=4)


def request(at, tokens, answer=1):
    return Request(token_ids=np.array(tokens, np.int32), max_tokens=answer, timestamp_s=at)


def watched(policy="round_robin", **config):
    options = {"replicas": 1, "blocks": 64, "block_size": 4, "timing": SIMPLE, **config}
    fleet = Fleet(FleetConfig(**options), policy)
    fleet.measures.journal = Journal(4)
    return fleet


def lost(fleet, requests):
    """The classes that are not empty; all tokens must be in one of them."""
    measures = fleet.run(requests)
    tokens = measures.journal.losses.tokens
    served = measures.journal.prompt_tokens
    assert tuple(tokens) == CLASSES and min(tokens.values()) >= 0
    assert sum(tokens.values()) == sum(served) == sum(len(r.known_tokens()) for r in requests)
    assert tokens["hit"] == sum(measures.journal.cached_tokens)
    return {name: count for name, count in tokens.items() if count}


FAIL = Change.parse("fail:0@1.5")
A, B = range(24), range(100, 124)


def test_what_nobody_has_seen_is_the_workload():
    assert lost(watched(), [request(0, A), request(100, B)]) == {"workload": 48}


def test_the_last_token_and_what_follows_the_last_full_block_are_never_seen():
    assert lost(watched(), [request(0, A), request(100, A)]) == {"hit": 23, "workload": 24 + 1}
    # 22 tokens are 5 blocks and a part, which is not published.
    assert lost(watched(), [request(0, range(22)), request(100, range(30))]) == {"hit": 20, "workload": 32}


def test_a_part_of_a_block_that_was_hit_counts_as_hit():
    halves = [request(0, A), request(100, [*range(10), *range(50, 60)])]
    assert lost(watched(), halves) == {"hit": 10, "workload": 24 + 10}


def test_a_replica_that_was_known_to_hold_it_and_not_chosen_is_routing():
    assert lost(watched(replicas=2), [request(0, A), request(100, A)]) == {"routing": 23, "workload": 25}


def test_what_is_being_computed_elsewhere_counts_as_held_there():
    assert lost(watched(replicas=2), [request(0, A), request(0.5, A)]) == {"routing": 23, "workload": 25}


def test_what_the_router_has_not_heard_of_is_staleness():
    fleet = watched(replicas=2, routers=2, event_delay_s=1e6)
    # The routers take turns; the second one sends A to replica 0, the first one then A to replica 1.
    assert lost(fleet, [request(0, B), request(100, A), request(200, A)]) == {"staleness": 23, "workload": 49}


def test_what_no_replica_holds_any_more_is_capacity():
    fleet = watched(blocks=8)
    # B takes 6 blocks, 2 of which were free: A keeps its first 2.
    assert lost(fleet, [request(0, A), request(100, B), request(200, A)]) == {
        "hit": 8,
        "capacity": 15,
        "workload": 49,
    }


def test_what_was_evicted_between_decision_and_claim_is_staleness():
    fleet = watched(blocks=12, eviction="lru", express=False, timing=replace(SIMPLE, max_num_seqs=1))
    busy, long = request(50, range(200, 208), 4), request(50.5, range(300, 332))
    requests = [request(0, A), busy, long, request(50.6, A)]
    # All of A was there when it came again; the long prompt before it took 4 of its 6 blocks.
    assert lost(fleet, requests) == {"hit": 8, "staleness": 15, "workload": 24 + 8 + 32 + 1}


def test_a_policy_without_beliefs_is_taken_to_know_the_truth():
    fleet = watched("random", replicas=2, seed=0)
    requests = [request(100 * number, A) for number in range(6)]
    found = lost(fleet, requests)
    assert found == {"hit": 4 * 23, "routing": 23, "workload": 24 + 5}
    assert fleet.measures.journal.reasons == {}


class Asking(Losses):
    """Asks every cache, and must find what the short account finds."""

    def placed(self, request, caches):
        self._forget(request)
        most = max(self._resident(request, caches, number) for number in range(len(caches)))
        super().placed(request, caches)
        assert self._open[request].there == self._tokens(request, most)


@pytest.mark.parametrize("policy", [*PLACED, *OTHERS])
def test_every_token_is_in_one_class(policy):
    rng, chats, requests = np.random.default_rng(3), {}, []
    for number in range(120):
        name = int(rng.integers(12))
        chats[name] = [*chats.get(name, [name % 3] * 9), *rng.integers(3, 99, 7).tolist()][:60]
        requests.append(request(number * 0.7, chats[name], int(rng.integers(1, 9))))
    fleet = watched(policy, replicas=3, blocks=40, routers=2, event_delay_s=0.5)
    fleet.measures.journal.losses = Asking(4)
    found = lost(fleet, requests)
    assert {"hit", "workload", "routing"} <= found.keys()
    assert sum(fleet.measures.journal.reasons.values()) == (120 if policy in PLACED else 0)


def test_a_request_that_is_sent_anew_counts_once():
    fleet, losses = watched(replicas=2), Losses(4)
    seen = []
    fleet.measures.journal.placed = lambda sim, caches: seen.append((sim, caches))
    fleet.run([request(0, A)])
    ((sim, caches),) = seen
    losses.placed(sim, caches)
    losses.lost([sim])
    sim.replica = 1
    losses.placed(sim, caches)
    losses.ended(sim)
    losses.ended(sim)
    assert sum(losses.tokens.values()) == 24 and not losses._open and not any(losses._on_way.values())


def test_what_only_a_replica_that_is_gone_had_is_capacity():
    config = {"replicas": 2, "changes": (Change.parse("leave:0@1"), Change.parse("join@2"))}
    # Replica 0 is still answering the first request when the second one comes.
    assert lost(watched(**config), [request(0, A, 50), request(3, A)]) == {"capacity": 23, "workload": 25}


def test_requests_that_die_with_a_replica_leave_nothing_there():
    config = {"replicas": 2, "changes": (Change.parse("leave:1@0"), Change.parse("join@1"), FAIL)}
    fleet = watched(**config)
    # Both are on replica 0 when it dies. The first was sent before, but nobody holds any of it any more: not
    # the second one either, which is still to be placed anew.
    assert lost(fleet, [request(0.0, A), request(0.1, A)]) == {"capacity": 23, "hit": 23, "workload": 2}
    assert fleet.measures.moved == 2 and fleet.measures.per_replica == {2: 2}


def test_the_run_is_the_same_with_and_without_a_journal():
    requests = [request(number, range(number % 5, number % 5 + 20), 3) for number in range(40)]
    plain = Fleet(watched().config, "cache_aware").run(requests).as_json()
    watched_run = watched("cache_aware").run(requests).as_json()
    assert watched_run.pop("reasons") == {"only_replica": 40}
    assert sum(watched_run.pop("prompt_tokens_by_fate").values()) == 800
    for timed in ("wall_seconds", "decide_us"):
        del plain[timed], watched_run[timed]
    assert plain == watched_run


def test_sent_prefixes():
    """Numbers stand in for prefix hashes: equal ones have equal beginnings."""
    sent = SentPrefixes()
    hashes = [np.array(row, np.uint64) for row in ([1, 2, 3, 4], [1, 2, 30], [1], [], [9], [1, 2, 3, 4, 5])]
    assert sent.find(hashes[0]) == []
    sent.add(hashes[0], 0)
    assert sent.find(hashes[0]) == [(4, 0b1)] == sent.find(hashes[5])
    assert sent.find(hashes[1]) == [(2, 0b1)]
    sent.add(hashes[1], 1)
    assert sent.find(hashes[0]) == [(4, 0b1), (2, 0b11)]
    assert sent.find(hashes[1]) == [(3, 0b10), (2, 0b11)]
    sent.add(hashes[2], 5)
    sent.add(hashes[3], 6)
    sent.add(hashes[5], 2)
    assert sent.find(hashes[5]) == [(5, 0b100), (4, 0b101), (2, 0b111), (1, 0b100111)]
    assert sent.find(hashes[2]) == [(1, 0b100111)]
    assert sent.find(hashes[3]) == sent.find(hashes[4]) == []


@pytest.mark.parametrize("seed", range(5))
def test_sent_prefixes_like_a_table_of_all_blocks(seed):
    rng, sent, table = np.random.default_rng(seed), SentPrefixes(), {}
    for _ in range(200):
        digits = rng.integers(0, 3, rng.integers(0, 8))
        row = np.array([int("1" + "".join(map(str, digits[: i + 1]))) for i in range(len(digits))], np.uint64)
        depths = [0] * len(row)
        for depth, replicas in sent.find(row):
            depths[:depth] = [replicas] * depth
        assert depths == [table.get(key, 0) for key in row.tolist()]
        replica = int(rng.integers(70))
        sent.add(row, replica)
        table.update((key, table.get(key, 0) | 1 << replica) for key in row.tolist())
