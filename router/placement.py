"""Where a request goes: fingerprints say who holds its prefix, the ledger who is busy, the policy decides.

`Placement.place` is synchronous: choosing and reserving is one step, so that concurrent requests see each
other and do not herd. Everything here runs on *one* event loop (or one thread); nothing locks, nothing waits.
"""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.fingerprint import FingerprintUpdate
from router.errors import ConfigError, NoReplica, QueueFull
from router.fingerprints import ColumnStats, Fingerprints
from router.ledger import Reservation
from router.loads import Loads
from router.policy import Choice, Situation, make_policy
from router.suspicion import Suspicion

logger = logging.getLogger(__name__)

_RETRY_MIN_S, _RETRY_MAX_S = 1.0, 60.0

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Candidate:
    """One replica as a decision saw it."""

    replica_id: str
    hit_tokens: int
    wait_s: float
    """Until what waits there is computed."""
    cost_s: float | None
    """The policy's cost; None for policies without one."""


@dataclass(slots=True)
class Decision:
    """Where a request goes, and why."""

    replica_id: str
    predicted_tokens: int
    """Prompt tokens expected to be cached there."""
    best_tokens: int
    """The longest hit on any replica that was allowed; the rest is what the choice gives up."""
    reason: str
    """One word: only_replica, prefix, in_flight_prefix, load, age, tie or round_robin."""
    reservation: Reservation
    _choice: Choice = field(repr=False)
    _situation: Situation = field(repr=False)
    _names: tuple[str | None, ...] = field(repr=False)

    def candidates(self, most: int = 4) -> list[Candidate]:
        """The replicas this decision was between, cheapest (else longest hit) first."""
        s, cost = self._situation, self._choice.cost_s
        wait_s = s.wait_work * s.loads.token_s
        order = np.argsort(cost if cost is not None else -s.hit_tokens, kind="stable")
        found: list[Candidate] = []
        for slot in order.tolist():
            name = self._names[slot]
            if name is not None and s.allowed[slot] and len(found) < most:
                cost_s = None if cost is None else float(cost[slot])
                found.append(Candidate(name, int(s.hit_tokens[slot]), float(wait_s[slot]), cost_s))
        return found


@dataclass
class PlacementCounters:
    """Totals since the start, over all replicas."""

    placed: Counter[str] = field(default_factory=Counter)
    """Decisions by reason."""
    not_best: int = 0
    """Decisions for a replica with less than the longest hit."""
    lost_tokens: int = 0
    """Prompt tokens that those gave up."""
    queue_full: int = 0
    refused_updates: int = 0
    """Fingerprint updates that need a snapshot."""
    suspected: int = 0
    """Times a replica's fingerprint became suspect because it persistently promised too much."""


class Placement:
    """Chooses and reserves. See the module docstring for threads."""

    def __init__(
        self,
        policy: str = "cache_aware",
        *,
        block_size: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        max_inflight_per_replica: int = 256,
    ) -> None:
        """`block_size` (tokens) may be set later, once a replica told it, but before the first hashes come.

        A replica that draws `max_inflight_per_replica` choices for this router gets no more requests. Raises
        `UnknownPolicy`, and `ConfigError` for a limit below 1.
        """
        if max_inflight_per_replica < 1:
            raise ConfigError(f"max_inflight_per_replica must be at least 1, not {max_inflight_per_replica}")
        self.block_size = block_size
        self.counters = PlacementCounters()
        self.fingerprints = Fingerprints(clock)
        self.loads = Loads(clock)
        self.ledger = self.loads.ledger
        self._policy = make_policy(policy, rng or random.Random())
        self._clock = clock
        self._limit = max_inflight_per_replica
        self._suspicion: dict[str, Suspicion] = {}
        self._reports: dict[str, Mapping[str, Any]] = {}
        self._names: tuple[str | None, ...] = ()  # by slot; replaced, never changed, so decisions may keep it
        self._live = np.zeros(0, dtype=np.bool_)

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return self._policy.name

    @property
    def replica_ids(self) -> list[str]:
        """Replicas that may get requests, in the order they joined."""
        return list(self._suspicion)

    def join(self, replica_id: str) -> None:
        """A replica may get requests from now on; it is cold and idle as far as known. Idempotent."""
        if replica_id in self._suspicion:
            return
        slot = self.fingerprints.join(replica_id)
        self._suspicion[replica_id] = Suspicion()
        self._fit()
        self.loads.join(replica_id, slot)
        self._name(slot, replica_id)

    def leave(self, replica_id: str) -> None:
        """A replica is gone: no bit, no figure of it stays. Requests there may still `finish`. Idempotent."""
        if self._suspicion.pop(replica_id, None) is None:
            return
        self._reports.pop(replica_id, None)
        self._name(self.fingerprints.slot(replica_id), None)
        self.ledger.drop_replica(replica_id)
        self.fingerprints.leave(replica_id)
        self._fit()

    def update(
        self, replica_id: str, update: FingerprintUpdate | None, load: Mapping[str, Any] | None = None
    ) -> bool:
        """Take in one poll's answer: cache changes, if any, and the `LoadReport`.

        Returns False when the caller must ask for a snapshot (see `Fingerprints.apply`) or the replica left.
        """
        suspicion = self._suspicion.get(replica_id)
        if suspicion is None:
            return False
        if load is not None:
            self.loads.report(replica_id, self.fingerprints.slot(replica_id), load)
            self._reports[replica_id] = load
        if update is None:
            return True
        if not self.fingerprints.apply(replica_id, update):
            self.counters.refused_updates += 1
            return False
        if update.snapshot:
            suspicion.clear()
        self.ledger.stored(replica_id, update.epoch, update.seq)
        return True

    def needs_resync(self, replica_id: str) -> bool:
        """Whether the next poll must ask for a snapshot: nothing agreed on, or the replica is suspect."""
        suspicion = self._suspicion.get(replica_id)
        if suspicion is None:
            return False
        return suspicion.suspect or self.fingerprints.position(replica_id)[0] is None

    def place(
        self,
        hashes: Hashes,
        num_tokens: int,
        *,
        exclude: frozenset[str] = frozenset(),
        publish: bool = True,
        choices: int = 1,
    ) -> Decision:
        """Choose a replica for a prompt and reserve it there.

        Args:
            hashes: prefix hashes of the prompt's full blocks, uint64[n]; empty for one without affinity.
            num_tokens: length of the prompt.
            exclude: replicas that must not get it (earlier attempts).
            publish: whether its blocks will be stored for others.
            choices: answers to it that are drawn at the same time.

        Raises:
            NoReplica: none is known, or all are excluded.
            QueueFull: all others are at `max_inflight_per_replica`.
        """
        now = self._clock()
        allowed, allowed_count = self._allowed(exclude, now)
        situation = self._situation(hashes, num_tokens, allowed, now)
        choice = self._policy.choose(situation)
        replica_id = self._names[choice.slot]
        assert replica_id is not None and allowed[choice.slot]
        predicted = int(situation.hit_tokens[choice.slot])
        best = situation.best_tokens
        work = round(float(situation.work[choice.slot]))
        reservation = self.ledger.reserve(
            replica_id, hashes if publish else None, num_tokens, predicted, now, choices, work
        )
        self.loads.sent(choice.slot, -(-reservation.miss_tokens // situation.block_size), now)
        reason = choice.reason if allowed_count > 1 else "only_replica"
        self._count(reason, best - predicted)
        return Decision(replica_id, predicted, best, reason, reservation, choice, situation, self._names)

    def on_start(self, placed: Decision | Reservation, chunk: Mapping[str, Any]) -> None:
        """The start chunk came: `replica`, `cached_tokens`, and `epoch` and `seq` of its cache by then."""
        reservation = placed.reservation if isinstance(placed, Decision) else placed
        replica_id = str(chunk["replica"])
        planned = reservation.replica_id
        epoch, seq, cached = chunk.get("epoch"), int(chunk.get("seq", 0)), int(chunk["cached_tokens"])
        self.ledger.start(reservation, replica_id, cached, epoch, seq)
        suspicion = self._suspicion.get(replica_id)
        if suspicion is None:
            return
        known_epoch, known_seq = self.fingerprints.position(replica_id)
        if known_epoch is None:
            return
        if epoch is not None and epoch != known_epoch:
            self.fingerprints.wipe(replica_id)  # it restarted, and its cache with it
            self.ledger.stored(replica_id, epoch, 0)
        else:
            self.ledger.stored(replica_id, known_epoch, known_seq)
            promised = reservation.predicted_tokens if planned == replica_id else 0
            if suspicion.observe(promised, cached, self.block_size or 1):
                self.counters.suspected += 1
                logger.warning("replica %s holds less than its fingerprint says: will resync", replica_id)

    def finish(self, reservation: Reservation) -> None:
        """The request is over: answered, failed, aborted or given up. Idempotent."""
        replica_id = reservation.replica_id
        if replica_id is not None:
            self.loads.busy_at[self.fingerprints.slot(replica_id)] = self._clock()
            known = self.fingerprints.position(replica_id)[0] is not None
            self.ledger.finish(reservation, keep=known)  # else perhaps no update ever shows its prompt

    def stats(self) -> dict[str, dict[str, int]]:
        """This router's figures by replica (`LedgerStats`); all exactly 0 when it is idle."""
        return {replica_id: asdict(self.ledger.stats(replica_id)) for replica_id in self._suspicion}

    def reports(self) -> dict[str, Mapping[str, Any]]:
        """Each replica's last `LoadReport`: what it said of itself, all routers' requests included."""
        return dict(self._reports)

    def knowledge(self) -> dict[str, ColumnStats]:
        """How well each replica's cache is known: staleness and repairs."""
        return {replica_id: self.fingerprints.stats(replica_id) for replica_id in self._suspicion}

    def _situation(
        self, hashes: Hashes, num_tokens: int, allowed: npt.NDArray[np.bool_], now: float
    ) -> Situation:
        size = self.block_size
        if size is None:
            if len(hashes):
                raise ConfigError("placement got prefix hashes before it was told the block size")
            size = 1
        longest = max(0, num_tokens - 1)  # the last token is always computed
        depth = self.fingerprints.match(hashes)
        hit = depth * size
        np.minimum(hit, longest, out=hit)
        pending = None
        if len(self.ledger.in_flight) and self.ledger.in_flight.deepen(hashes, depth):
            stored, hit = hit, np.minimum(depth * size, longest)
            pending = hit - stored
        best = int((hit * allowed).max())
        return Situation(
            allowed=allowed,
            hit_tokens=hit,
            pending_tokens=pending,
            best_tokens=best,
            work=self.loads.work(hit, num_tokens),
            wait_work=self.loads.wait_work(now),
            requests=self.loads.requests(),
            queued=self.loads.queued(),
            hashes=hashes,
            num_tokens=num_tokens,
            block_size=size,
            loads=self.loads,
            now=now,
        )

    def _allowed(self, exclude: frozenset[str], now: float) -> tuple[npt.NDArray[np.bool_], int]:
        """Replicas that may take a request, bool[capacity], and how many they are."""
        known = self._live
        if exclude:
            known = known.copy()
            for replica_id in exclude & self._suspicion.keys():
                known[self.fingerprints.slot(replica_id)] = False
        allowed = known & (self.ledger.outstanding < self._limit)
        count = int(np.count_nonzero(allowed))
        if not count:
            if not known.any():
                raise NoReplica("every replica was excluded" if self._suspicion else "no replica is known")
            self.counters.queue_full += 1
            raise QueueFull(self._retry_after_s(known, now))
        return allowed, count

    def _retry_after_s(self, known: npt.NDArray[np.bool_], now: float) -> float:
        """When the shortest queue is worked off, which lets at least one request end."""
        waits = (self.loads.wait_work(now) * self.loads.token_s)[known]
        return float(np.clip(waits.min(), _RETRY_MIN_S, _RETRY_MAX_S))

    def _count(self, reason: str, lost: int) -> None:
        self.counters.placed[reason] += 1
        if lost > 0:
            self.counters.not_best += 1
            self.counters.lost_tokens += lost

    def _name(self, slot: int, replica_id: str | None) -> None:
        names = list(self._names)
        names[slot] = replica_id
        self._names = tuple(names)
        self._live[slot] = replica_id is not None

    def _fit(self) -> None:
        """Follow the matrix when it gained or lost columns."""
        capacity = self.fingerprints.capacity
        if capacity != len(self._names):
            self._names = (*self._names[:capacity], *[None] * (capacity - len(self._names)))
            self._live = np.array([name is not None for name in self._names], dtype=np.bool_)
            self.loads.resize(capacity)


def compile_decisions() -> None:
    """Compile what decisions run, so that no request waits for it: takes about a second, once a machine."""
    placement = Placement(block_size=1)
    placement.join("any")
    for _ in range(2):  # the second one meets the first in the overlay
        placement.place(np.zeros(2, dtype=np.uint64), 3)
