"""A fleet under a virtual clock: requests come, policies place them, replicas compute, routers hear of it.

Everything is deterministic: events at the same instant happen in the order in which they were planned, and
all chance comes from one seed.
"""

import heapq
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt

from kvcore.events import BlocksRemoved, BlocksStored, Cleared, Event
from kvcore.filters import CountingFilter, FilterGeometry
from kvcore.fingerprint import FingerprintUpdate
from kvcore.hashing import PrefixHasher
from router.lab.errors import OptionError
from router.lab.record import Request
from router.lab.sim.measures import Measures
from router.lab.sim.policies import News, SimPolicy, make_policy
from router.lab.sim.replica import SPACE, SimReplica
from router.lab.sim.request import SimRequest
from router.lab.sim.timing import Timing


@dataclass(frozen=True)
class FleetConfig:
    """A fleet: `replicas` engines with `blocks` blocks of `block_size` tokens, seen by `routers` routers.

    What a replica's cache has gained and lost, and its load, reach every router `event_delay_s` later.
    `slow` makes that share of the replicas take `slow_factor` times as long for everything.
    """

    replicas: int = 8
    blocks: int = 2000
    block_size: int = 512
    timing: Timing = field(default_factory=lambda: Timing.preset("h100-8b"))
    routers: int = 1
    event_delay_s: float = 0.01
    eviction: str = "reuse"
    seed: int = 0
    slow: float = 0.0
    slow_factor: float = 2.0

    def __post_init__(self) -> None:
        if min(self.replicas, self.blocks, self.block_size, self.routers) < 1:
            raise OptionError("replicas, blocks, block size and routers must be positive")
        if self.event_delay_s < 0 or not 0 <= self.slow <= 1 or self.slow_factor <= 0:
            raise OptionError("delay and share of slow replicas must not be negative")


class _Told:
    """What the routers have been told of one replica's cache."""

    def __init__(self, replica: SimReplica, geometry: FilterGeometry) -> None:
        self._replica, self._cache = replica, replica.cache
        self._filter, self._seq = CountingFilter(geometry), 0
        self.planned = False

    def news(self, everything: bool) -> News:
        """What has changed since the last call, or all there is."""
        base, load = self._seq, self._replica.load()
        if base == self._cache.seq and not everything:
            return News(None, [], load)
        before, events = self._filter.bits, self._changes(base)
        for event in events:
            if isinstance(event, BlocksStored):
                self._filter.add(event.hashes)
            elif isinstance(event, BlocksRemoved):
                self._filter.remove(event.hashes)
            elif isinstance(event, Cleared):
                self._filter.clear()
        self._seq = self._cache.seq
        return News(self._update(base, before, everything), events, load)

    def _changes(self, base: int) -> list[Event]:
        events = self._cache.events.since(self._cache.epoch, base)
        if events is None:  # more than the log holds: all from the beginning
            everything = self._cache.snapshot()
            seq = self._cache.seq
            return [Cleared(seq), BlocksStored(seq, everything.hashes, None, SPACE.digest())]
        return events

    def _update(self, base: int, before: npt.NDArray[np.bool_], everything: bool) -> FingerprintUpdate:
        after = self._filter.bits
        gained, lost = np.flatnonzero(after & ~before), np.flatnonzero(before & ~after)
        return FingerprintUpdate(
            epoch=self._cache.epoch,
            base_seq=0 if everything else base,
            seq=self._seq,
            geometry=self._filter.geometry,
            snapshot=everything,
            set_rows=(np.flatnonzero(after) if everything else gained).astype(np.uint32),
            digest=self._filter.digest,
            cleared_rows=(lost[:0] if everything else lost).astype(np.uint32),
        )


class Fleet:
    """One simulation of one policy. See the module docstring."""

    def __init__(self, config: FleetConfig, policy: str) -> None:
        self.config = config
        self.now = 0.0
        rng = random.Random(config.seed)
        self._hasher = PrefixHasher(b"simulation")
        self._root = self._hasher.root(SPACE)
        self.policy: SimPolicy = make_policy(policy, config.block_size, config.routers, self.clock, rng)
        self.replicas = [self._replica(number) for number in range(config.replicas)]
        geometry = FilterGeometry.for_blocks(config.blocks)
        self._told = [_Told(replica, geometry) for replica in self.replicas]
        self._events: list[tuple[float, int, str, int]] = []
        self._order = count()
        self._versions = [0] * config.replicas
        self.measures = Measures(policy, config.replicas)

    def clock(self) -> float:
        """The simulated time, seconds."""
        return self.now

    def run(self, requests: Iterable[Request], speed: float = 1.0) -> Measures:
        """Simulate all requests, which come in the order of their times, `speed` times as fast."""
        started = time.perf_counter()
        for number in range(self.config.replicas):
            self.policy.joined(number)
            self._hear(number)
        for request in requests:
            at = (request.timestamp_s or 0.0) / speed
            self._until(at)
            self.now = max(self.now, at)
            self._arrive(request)
        self._until(float("inf"))
        self.measures.finish(self.now, time.perf_counter() - started, [r.busy_s for r in self.replicas])
        return self.measures

    def _replica(self, number: int) -> SimReplica:
        config = self.config
        slow = number < config.slow * config.replicas
        timing = config.timing.slower(config.slow_factor) if slow else config.timing
        return SimReplica(
            str(number), timing, config.blocks, config.block_size, self._hasher, self.clock, config.eviction
        )

    def _arrive(self, request: Request) -> None:
        tokens = request.known_tokens()
        if tokens is None:
            raise OptionError("a simulation needs a trace with token ids or hash ids")
        if len(tokens) + (request.max_tokens or 1) > self.config.blocks * self.config.block_size:
            self.measures.refused += 1
            return
        hashes = self._hasher.block_hashes(tokens, self.config.block_size, self._root)
        sim = SimRequest(tokens, hashes, request.max_tokens or 1, self.now, request.session_id)
        began = time.perf_counter()
        replica = self.policy.place(sim)
        self.measures.decided(time.perf_counter() - began)
        if replica is None:
            self.measures.refused += 1
            return
        sim.replica = replica
        self.measures.placed(sim, self.replicas)
        self.replicas[replica].add(sim)
        self._plan(replica)

    def _until(self, end: float) -> None:
        """Let everything happen that is due before `end`."""
        while self._events and self._events[0][0] <= end:
            self.now, _, kind, number = heapq.heappop(self._events)
            if kind == "hear":
                self._told[number].planned = False
                self._hear(number)
            elif self.replicas[number].due == self.now:  # else it was planned anew since
                self._step_ended(number)

    def _step_ended(self, number: int) -> None:
        replica = self.replicas[number]
        ended = replica.end()
        for request in ended.first:
            self.policy.started(request, replica.cache.epoch, replica.cache.seq)
        for request in ended.last:
            self.policy.finished(request)
            self.measures.add(request, self.now)
        self._plan(number)

    def _plan(self, number: int) -> None:
        """Plan the end of a replica's step, and that routers hear what has changed."""
        replica, told = self.replicas[number], self._told[number]
        if replica.due is not None:
            heapq.heappush(self._events, (replica.due, next(self._order), "step", number))
        if not told.planned:
            told.planned = True
            at = self.now + self.config.event_delay_s
            heapq.heappush(self._events, (at, next(self._order), "hear", number))

    def _hear(self, number: int) -> None:
        news = self._told[number].news(everything=self.policy.suspects(number))
        self.policy.heard(number, news)
