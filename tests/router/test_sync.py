"""The sync against scripted replicas: joins, losses, gaps, strangers. Real placement, real fingerprints."""

import asyncio
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from kvcore.cache import PrefixCache
from kvcore.fingerprint import FilterGeometry
from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace
from replica.fingerprint_feed import FingerprintFeed
from router.dispatch import ModelInfo
from router.errors import ConfigError, ReplicaLost
from router.membership import Membership
from router.placement import Placement
from router.sync import FleetSync, SyncSettings

BLOCK = 4
NAMESPACE = Namespace("model")
HASHER = PrefixHasher(b"secret")
QUICK = SyncSettings(hold_s=5.0, grace_s=5.0, min_interval_s=0.0, retry_min_s=0.001, retry_max_s=0.002)


class Replica:
    """A cache with its feed; changes wake the poll that waits."""

    def __init__(self) -> None:
        self.restart()
        self.dead = False
        self.fault: BaseException | None = None  # of the next poll
        self.polls: list[dict] = []

    def restart(self) -> None:
        self.cache = PrefixCache(64, BLOCK, HASHER)
        self.feed = FingerprintFeed(self.cache, FilterGeometry.for_blocks(64))
        self.changed = asyncio.Event()

    def store(self, tokens: np.ndarray) -> None:
        lease = self.cache.claim(tokens, NAMESPACE)
        self.cache.commit(lease, len(tokens))
        self.cache.release(lease)
        self.changed.set()


class Fleet:
    """Stands for the way to the replicas; `model` is what they say they run."""

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = defaultdict(Replica)
        self.lost: list[str] = []
        self.load: dict = {}
        self.model = {"digest": "d", "layout": "l", "block_size": BLOCK, "context_length": 99}

    async def connect(self, timeout_s: float) -> None:
        await asyncio.sleep(0)

    async def poll(self, replica_id: str, request: dict, timeout_s: float) -> dict:
        await asyncio.sleep(0)
        replica = self.replicas[replica_id]
        replica.polls.append(request)
        update = None
        while not replica.dead and replica.fault is None:
            replica.changed.clear()
            update = replica.feed.update_since(request["epoch"], request["seq"])
            if update is not None or request["timeout_s"] == 0.0:
                break
            await replica.changed.wait()
        if replica.fault is not None:
            fault, replica.fault = replica.fault, None
            raise fault
        if replica.dead:
            raise ReplicaLost(replica_id)
        load = self.load or {"waiting": 0, "running": 0, "waiting_tokens": 0, "free": 64, "num_blocks": 64}
        wire = None if update is None else update.encode()
        return {"v": 1, "replica": replica_id, "update": wire, "load": load, "model": self.model}


@pytest.fixture
async def fleet():
    yield Fleet()


@pytest.fixture
async def start(fleet):
    """Start a sync over the fleet; returns (sync, placement, members)."""
    running = []

    def build(on_model=lambda told: None, settings=QUICK):
        placement = Placement(block_size=BLOCK)
        members = Membership()

        def lose(replica_id: str) -> None:
            fleet.lost.append(replica_id)
            placement.leave(replica_id)

        sync = FleetSync(fleet, placement, members, on_model, lose, settings)
        sync.start()
        running.append(sync)
        return sync, placement, members

    yield build
    for sync in running:
        await asyncio.wait_for(sync.stop(), 5)


async def until(condition) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("did not come true")


def hit(placement: Placement, tokens: np.ndarray) -> tuple[str, int]:
    hashes = HASHER.block_hashes(tokens, BLOCK, HASHER.root(NAMESPACE))
    decision = placement.place(hashes, len(tokens))
    placement.finish(decision.reservation)
    return decision.replica_id, decision.predicted_tokens


PROMPT = np.arange(41, dtype=np.int32)


async def test_what_a_replica_stores_is_known_to_placement(fleet, start) -> None:
    sync, placement, members = start()
    members.publish(frozenset({"a", "b"}))
    await until(lambda: set(placement.replica_ids) == {"a", "b"})
    assert sync.ready.is_set()
    fleet.replicas["b"].store(PROMPT)
    await until(lambda: placement.fingerprints.position("b")[1] == fleet.replicas["b"].cache.seq)
    assert hit(placement, PROMPT) == ("b", 40)


async def test_a_replica_that_left_is_forgotten(fleet, start) -> None:
    _, placement, members = start()
    members.publish(frozenset({"a", "b"}))
    await until(lambda: len(placement.replica_ids) == 2)
    members.publish(frozenset({"b"}))
    await until(lambda: placement.replica_ids == ["b"])
    assert list(placement.reports()) == ["b"]
    assert fleet.lost == []  # it may be shutting down in good order


async def test_a_replica_that_stops_answering_leaves_at_once_and_comes_back_cold(fleet, start) -> None:
    _, placement, members = start()
    members.publish(frozenset({"a"}))
    replica = fleet.replicas["a"]
    replica.store(PROMPT)
    await until(lambda: placement.replica_ids == ["a"] and hit(placement, PROMPT) == ("a", 40))
    replica.dead = True
    replica.changed.set()
    await until(lambda: placement.replica_ids == [])
    assert fleet.lost[0] == "a"
    replica.restart()
    replica.dead = False
    await until(lambda: placement.replica_ids == ["a"])
    assert hit(placement, PROMPT) == ("a", 0)
    assert replica.polls[-1]["epoch"] in (None, replica.cache.epoch)


async def test_a_restart_in_place_is_believed_cold_once_it_answers(fleet, start) -> None:
    _, placement, members = start()
    members.publish(frozenset({"a"}))
    replica = fleet.replicas["a"]
    replica.store(PROMPT)
    await until(lambda: placement.replica_ids == ["a"] and hit(placement, PROMPT) == ("a", 40))
    waiting = replica.changed
    replica.restart()
    waiting.set()
    await until(lambda: hit(placement, PROMPT) == ("a", 0))
    replica.store(PROMPT)
    await until(lambda: hit(placement, PROMPT) == ("a", 40))


async def test_a_replica_with_another_model_never_joins(fleet, start) -> None:
    def refuse(told: dict) -> None:
        raise ConfigError("another model")

    sync, placement, members = start(refuse)
    members.publish(frozenset({"a"}))
    await until(lambda: len(fleet.replicas["a"].polls) > 3)
    assert placement.replica_ids == []
    assert not sync.ready.is_set()


async def test_a_cancelled_poll_is_a_failed_one(fleet, start) -> None:
    """Whatever cancels a poll from outside must not end the following of its replica."""
    _, placement, members = start()
    members.publish(frozenset({"a"}))
    replica = fleet.replicas["a"]
    await until(lambda: placement.replica_ids == ["a"])
    replica.fault = asyncio.CancelledError()
    replica.changed.set()
    await until(lambda: fleet.lost == ["a"])
    await until(lambda: placement.replica_ids == ["a"])
    replica.store(PROMPT)
    await until(lambda: hit(placement, PROMPT) == ("a", 40))


async def test_a_poll_that_fails_because_this_process_was_held_up_loses_nobody(fleet, start) -> None:
    always_late = replace(QUICK, late_s=-100.0)  # stands for a process that was stopped for minutes
    _, placement, members = start(settings=always_late)
    members.publish(frozenset({"a"}))
    replica = fleet.replicas["a"]
    await until(lambda: placement.replica_ids == ["a"])
    replica.fault = ReplicaLost("a", "no answer in time")
    replica.changed.set()
    replica.store(PROMPT)
    await until(lambda: hit(placement, PROMPT) == ("a", 40))
    assert fleet.lost == []


@pytest.mark.parametrize(
    ("model", "load"),
    [
        ({"digest": "d", "surprise": 1}, {}),
        ("tiny", {}),
        (None, {"waiting": "many"}),
        (None, {"waiting": None}),
    ],
)
async def test_a_replica_that_talks_nonsense_is_asked_again(fleet, start, model, load) -> None:
    def hear(told: dict) -> None:
        ModelInfo(**told)

    _, placement, members = start(hear)
    sound = fleet.model
    fleet.model, fleet.load = model or sound, load
    members.publish(frozenset({"a"}))
    await until(lambda: len(fleet.lost) > 2)
    assert placement.replica_ids == []
    fleet.model, fleet.load = sound, {}
    await until(lambda: placement.replica_ids == ["a"])


async def test_stopping_ends_every_poll(fleet, start) -> None:
    sync, placement, members = start()
    members.publish(frozenset({"a", "b"}))
    await until(lambda: len(placement.replica_ids) == 2)
    await asyncio.wait_for(sync.stop(), 5)
    polls = {name: len(fleet.replicas[name].polls) for name in "ab"}
    members.publish(frozenset({"a", "b", "c"}))
    fleet.replicas["a"].store(PROMPT)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert {name: len(fleet.replicas[name].polls) for name in "ab"} == polls
    assert fleet.lost == []
