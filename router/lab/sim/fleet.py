"""A fleet under a virtual clock: requests come, policies place them, replicas compute, routers hear of it.

Everything is deterministic: events at the same instant happen in the order in which they were planned, and
all chance comes from one seed.
"""

import heapq
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from router.lab.errors import OptionError
from router.lab.pooled import prompt_length
from router.lab.record import Request
from router.lab.sim.changes import Change, check_changes
from router.lab.sim.measures import Measures
from router.lab.sim.policies import SimPolicy, make_policy
from router.lab.sim.replica import SimReplica
from router.lab.sim.request import SimRequest
from router.lab.sim.sessions import Sessions
from router.lab.sim.telling import Report, Telling
from router.lab.sim.tiers import TierConfig
from router.lab.sim.timing import Timing


@dataclass(frozen=True)
class FleetConfig:
    """A fleet: `replicas` engines with `blocks` blocks of `block_size` tokens, seen by `routers` routers.

    What a replica tells of its cache and load, every `tell_interval_s` at most, reaches every router
    `event_delay_s` later. `speeds` are the
    replicas' speeds, repeated as often as needed: (1, 0.5) makes every other one take twice as long.
    """

    replicas: int = 8
    blocks: int = 2000
    block_size: int = 512
    timing: Timing = field(default_factory=lambda: Timing.preset("h100-8b"))
    routers: int = 1
    event_delay_s: float = 0.01
    tell_interval_s: float = 0.05
    eviction: str = "reuse"
    seed: int = 0
    speeds: tuple[float, ...] = (1.0,)
    express: bool = True
    tiers: tuple[TierConfig, ...] = ()
    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        if min(self.replicas, self.blocks, self.block_size, self.routers) < 1:
            raise OptionError("replicas, blocks, block size and routers must be positive")
        if not 0 <= self.event_delay_s < float("inf"):
            raise OptionError(f"the event delay must be a time in seconds, not {self.event_delay_s}")
        if not self.speeds or not all(0 < speed < float("inf") for speed in self.speeds):
            raise OptionError("the speeds of replicas must be positive numbers")
        if self.tiers and not self.timing.kv_bytes:
            raise OptionError("lower tiers need a timing that knows the bytes of a token's KV: a preset")
        check_changes(self.changes, self.replicas)

    def holds(self, prompt_tokens: int, answer_tokens: int) -> bool:
        """Whether a replica has room for such a request."""
        return prompt_tokens + answer_tokens <= self.blocks * self.block_size

    def timing_of(self, number: int) -> Timing:
        """Step times of a replica, by its number."""
        return self.timing.slower(1 / self.speeds[number % len(self.speeds)])

    @property
    def members(self) -> int:
        """How many replicas there ever are: those at the beginning, and those that join."""
        return self.replicas + sum(change.kind == "join" for change in self.changes)

    @property
    def fastest(self) -> Timing:
        """Step times of the fastest of them."""
        return self.timing.slower(1 / max(self.speeds[: self.members]))


class Fleet:
    """One simulation of one policy. See the module docstring."""

    def __init__(self, config: FleetConfig, policy: str) -> None:
        self.config = config
        self.now = 0.0
        rng = random.Random(config.seed)
        self.policy: SimPolicy = make_policy(policy, config.block_size, config.routers, self.clock, rng)
        self.replicas: list[SimReplica] = []  # by number; those that left stay, without requests
        self.measures = Measures(policy)
        self._tellings: list[Telling] = []
        self._unread: dict[int, tuple[float, Report]] = {}  # when heard; by replica, the latest last
        self._alive: set[int] = set()
        self._sessions = Sessions(())
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def clock(self) -> float:
        """The simulated time, seconds."""
        return self.now

    def run(self, requests: Iterable[Request]) -> Measures:
        """Simulate all requests, given in the order of their times."""
        started = time.perf_counter()
        for _ in range(self.config.replicas):
            self._join()
        for change in self.config.changes:
            self._at(change.at_s, partial(self._change, change))
        self._sessions = Sessions(requests)
        for request in self._sessions.open:
            at = request.timestamp_s or 0.0
            self._until(at)
            self.now = max(self.now, at)
            self._arrive(request)
        self._until(float("inf"))
        wall_s = time.perf_counter() - started
        self.measures.finish(self.now, wall_s, [replica.busy_s for replica in self.replicas])
        return self.measures

    def _at(self, at: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), what))

    def _until(self, end: float) -> None:
        """Let everything happen that is due before `end`."""
        events = self._events
        while events and events[0][0] <= end:
            self.now, _, what = heapq.heappop(events)
            what()

    # --- Requests. ---

    def _arrive(self, request: Request) -> None:
        if self.config.holds(prompt_length(request), request.max_tokens or 1):
            self._place(SimRequest.of(request, self.config.block_size, self.now))
        else:
            self._refuse(request.session_id)

    def _place(self, sim: SimRequest) -> bool:
        """Whether a request found a replica; it is refused else."""
        if not self._alive:
            self._refuse(sim.session)
            return False
        self._read_all()
        began = time.perf_counter()
        replica = self.policy.place(sim)
        self.measures.decided(time.perf_counter() - began)
        if replica is None:
            self._refuse(sim.session)
            return False
        sim.replica = replica
        self.measures.placed(sim, self.replicas, self._alive)
        self.replicas[replica].add(sim)
        self._follow(replica)
        return True

    def _refuse(self, session: str | None) -> None:
        self.measures.refused += 1
        self._next_turn(session)

    def _next_turn(self, session: str | None) -> None:
        following = self._sessions.ended(session, self.now)
        if following is not None:
            at, request = following
            self._at(at, lambda: self._arrive(request))

    # --- Replicas. ---

    def _follow(self, number: int) -> None:
        """Plan the end of a replica's step, and that routers hear what has changed."""
        replica, telling = self.replicas[number], self._tellings[number]
        due = replica.due
        if due is not None:
            self._at(due, lambda: self._step_ended(number, due))
        if self.policy.wants == "nothing":
            return
        at = max(telling.due(), self.now)
        if at < telling.planned_at:
            telling.planned_at = at
            if at == self.now:
                self._tell(number)
            else:
                self._at(at, lambda: self._tell(number))

    def _step_ended(self, number: int, due: float) -> None:
        replica = self.replicas[number]
        if replica.due != due:
            return  # planned anew since
        ended = replica.end()
        if ended.first or ended.last:
            self._read(number)
        for request in ended.first:
            self.policy.started(request, replica.cache.epoch, replica.cache.seq)
        for request in ended.last:
            self.policy.finished(request)
            self.measures.add(request, self.now)
            self._next_turn(request.session)
        self._follow(number)
        if number not in self._alive and replica.due is None:
            replica.cache.clear()  # it has left

    def _tell(self, number: int) -> None:
        telling = self._tellings[number]
        if number not in self._alive or telling.planned_at > self.now:
            return  # gone, or told since
        report = telling.tell(self.now, everything=self.policy.suspects(number))
        self._at(self.now + self.config.event_delay_s, lambda: self._hear(number, report))

    def _hear(self, number: int, report: Report) -> None:
        """A report has reached the routers, who read it before anything that depends on what they know of the
        replica. Until then a later one may replace it."""
        if number not in self._alive:
            return
        if number in self._unread and not report.replaces(self._unread[number][1]):
            self._read(number)
        self._unread.pop(number, None)
        self._unread[number] = (self.now, report)
        if report.snapshot:
            self._read(number)

    def _read(self, number: int) -> None:
        if number in self._unread:
            now = self.now
            self.now, report = self._unread.pop(number)  # to the routers it is then
            self.policy.heard(number, self._tellings[number].news(report))
            self.now = now

    def _read_all(self) -> None:
        for number in list(self._unread):
            self._read(number)

    # --- Changes. ---

    def _change(self, change: Change) -> None:
        self._read_all()
        if change.kind == "join":
            self._join()
        else:
            self._lose(change.replica, fails=change.kind == "fail")

    def _join(self) -> None:
        config, number = self.config, len(self.replicas)
        replica = SimReplica(
            config.timing_of(number),
            config.blocks,
            config.block_size,
            self.clock,
            config.eviction,
            config.express,
            config.tiers,
        )
        self.replicas.append(replica)
        wants = self.policy.wants
        if wants == "load" and self.measures.journal is not None:
            wants = "fingerprint"  # the account of losses asks what the routers knew, though nobody used it
        self._tellings.append(Telling(replica, wants, config.tell_interval_s))
        self._alive.add(number)
        self.policy.joined(number)
        self._hear(number, self._tellings[number].tell(self.now, everything=True))
        self._read(number)

    def _lose(self, number: int, fails: bool) -> None:
        """A replica gets no more requests. Those that it has end there, unless it fails: then they start
        again elsewhere at once; what was produced is kept, and computed again."""
        self._alive.discard(number)
        lost = self.replicas[number].drop_all() if fails else []
        for sim in lost:
            self.policy.finished(sim)
        self.policy.left(number)
        self.measures.lost(lost)
        for sim in lost:
            self.measures.moved += self._place(sim)
