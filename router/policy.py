"""Who gets the request: policies are small classes, registered by name, that rank replicas as vectors.

`cache_aware` (the default) predicts for every replica, in seconds::

    cost = (wait + work) / rate                     until this request's first token
         + work / fleet's rate * evicts             what recomputing takes from others' caches and queues,
         + work / fleet's rate * delays             and from the requests there, which wait meanwhile
         + coming / fleet's rate                    a copy that is there is better than one that is coming

wait: work to be done there first; work: what is not cached of this prompt, with its attention
(`Loads.work`); rate: work/s. evicts is BETA - 1 where blocks must be evicted, and 0 where some are free:
recomputed tokens weigh more than waiting, because copies take the place of blocks that somebody else needs.
delays is CROWD for each request that is there now, and QUEUED more for each that still waits for its first
token. What recomputing costs others does not depend on whose speed it is done at, so the mean speed of the
fleet counts there. coming: tokens of this prompt that requests in flight still compute there and that
another replica has already.

That alone would leave peers idle beside a busy holder of a prefix, so the prefix is computed anew elsewhere

- when a replica was idle for BETA times as long as the whole prompt takes, and waiting for the holder takes
  longer than that whole prompt: nobody else needs that replica;
- when requests for this prefix have together waited for its holders BETA times (and once more for each
  request there) as long as computing it again takes (the ski-rental rule: rent until the rents have paid the
  price). A hot prefix is thus copied as often as its load needs, and a short queue scares nobody away.

Waiting for one's own prefix, being computed there just now, counts as no waiting in either case. While a
prefix is computed for the first time, replicas that compute nothing and have free blocks join in, up to
COPIES of them: its siblings, which may be many, then find it in several places with short queues.

Among replicas of nearly the same cost the one whose next eviction victim is oldest is taken, which makes
separate LRU caches behave like one large one; what is still equal is drawn at random.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from router.errors import UnknownPolicy
from router.loads import Loads

Vector = npt.NDArray[np.float64]

BETA = 5.0
"""Seconds of waiting that one second of recomputing weighs where it evicts other blocks."""
CROWD = 0.3
"""Share of its time by which a prefill delays each request at the replica."""
QUEUED = 0.2
"""Share more by which it delays each of those that wait for their first token."""
COPIES = 8
"""Replicas that compute a new prefix at the same time; each further one would shorten the queues little."""
NEAR = 0.05
"""Costs that differ by less than this part of the time to compute what misses count as equal."""


@dataclass(slots=True)
class Situation:
    """What a policy decides on; vectors are by slot, [capacity]."""

    allowed: npt.NDArray[np.bool_]
    """Replicas that may take the request; at least one."""
    hit_tokens: npt.NDArray[np.int64]
    """Prompt tokens expected to be cached at each replica when the request's turn comes."""
    pending_tokens: npt.NDArray[np.int64] | None
    """Those of `hit_tokens` that requests in flight still have to compute; None: nothing in flight."""
    best_tokens: int
    """The longest hit of an allowed replica."""
    work: Vector
    """What computing the rest of the prompt would cost each replica (`Loads.work`)."""
    wait_work: Vector
    """What must be computed at each replica before this request's turn comes."""
    requests: Vector
    """Requests at each replica, waiting and running; each of their choices counts."""
    queued: Vector
    """Those of them that wait for their first token."""
    hashes: npt.NDArray[np.uint64]
    num_tokens: int
    block_size: int
    loads: Loads
    now: float

    def prefix_key(self, slot: int) -> int:
        """Hash of the prefix that a replica with a hit holds."""
        return int(self.hashes[-(-int(self.hit_tokens[slot]) // self.block_size) - 1])


@dataclass(slots=True)
class Choice:
    """A policy's answer: the slot, why (a short stable word), and each slot's cost if it has one."""

    slot: int
    reason: str
    cost_s: Vector | None = None


class Policy(Protocol):
    """Chooses a replica. Stateful policies belong to one `Placement`."""

    name: ClassVar[str]

    def __init__(self, rng: random.Random) -> None: ...

    def choose(self, situation: Situation) -> Choice:
        """Pick one of the allowed slots; never waits, never raises."""
        ...


_POLICIES: dict[str, type[Policy]] = {}


def register(cls: type[Policy]) -> type[Policy]:
    """Class decorator: make a policy known under its `name`."""
    _POLICIES[cls.name] = cls
    return cls


def make_policy(name: str, rng: random.Random) -> Policy:
    """A new policy by name. Raises `UnknownPolicy`, which lists the known names."""
    if name not in _POLICIES:
        raise UnknownPolicy(name, _POLICIES)
    return _POLICIES[name](rng)


def policy_names() -> list[str]:
    """Names that `make_policy` knows, sorted."""
    return sorted(_POLICIES)


@register
class CacheAware:
    """The least predicted cost in seconds; see the module docstring."""

    name: ClassVar[str] = "cache_aware"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._regrets = _Regrets()

    def choose(self, s: Situation) -> Choice:
        """See `Policy`."""
        token_s = s.loads.token_s
        mean_s = float(token_s @ s.allowed) / np.count_nonzero(s.allowed)
        there_s = np.where(s.allowed, (s.wait_work + s.work) * token_s, np.inf)
        room = s.loads.has_room((s.num_tokens - s.hit_tokens) / s.block_size)
        others = np.where(room, 0.0, BETA - 1.0) + CROWD * s.requests + QUEUED * s.queued
        cost = there_s + mean_s * others * s.work
        if s.pending_tokens is not None:
            cost += mean_s * _coming(s, s.pending_tokens)
        best = int(cost.argmin())
        near_s = NEAR * float(s.work[best] * token_s[best])
        if s.hit_tokens[best] and s.wait_work[best] > 0.0:
            relief = int(there_s.argmin())
            if self._has_waited_enough(s, best, relief):
                slots = (there_s <= there_s[relief] + near_s).nonzero()[0]
                return Choice(self._oldest(s, slots)[0], "load", cost)
        if s.pending_tokens is not None and _is_new(s, s.pending_tokens, best):
            slots = _spread(s, s.pending_tokens, best, there_s, room)
        else:
            slots = (cost <= cost[best] + near_s).nonzero()[0]
        slot, by_age = self._oldest(s, slots)
        return Choice(slot, _reason(s, slot, len(slots) > 1, by_age), cost)

    def _has_waited_enough(self, s: Situation, best: int, relief: int) -> bool:
        """Whether `relief` should compute the prefix anew although `best` has it."""
        token_s, requests = s.loads.token_s, float(s.requests[relief])
        own = 0.0
        if s.pending_tokens is not None:
            pending = int(s.pending_tokens[best])
            own = pending * (1.0 + (int(s.hit_tokens[best]) - 0.5 * pending) * float(s.loads.attention[best]))
        wait_s = (float(s.wait_work[best]) - own) * float(token_s[best])
        saved_s = wait_s - float(s.wait_work[relief]) * float(token_s[relief])
        all_s = float(s.work[relief]) * float(token_s[relief])
        again_s = all_s - float(s.work[best]) * float(token_s[relief])
        if saved_s <= 0.0 or again_s <= 0.0:
            return False
        if wait_s > all_s and requests == 0.0 and s.now - s.loads.busy_at[relief] >= BETA * all_s:
            return True
        return self._regrets.add(s.prefix_key(best), saved_s, (BETA + requests) * again_s)

    def _oldest(self, s: Situation, slots: npt.NDArray[np.intp]) -> tuple[int, bool]:
        """Of some slots the one with the oldest eviction victim, and whether that alone decided."""
        if len(slots) == 1:
            return int(slots[0]), False
        blocks = (s.num_tokens - s.hit_tokens.take(slots)) / s.block_size
        ages = s.loads.victim_ages(slots, blocks, s.now)
        oldest = slots[ages == ages.max()]
        return int(self._rng.choice(oldest.tolist())), len(oldest) < len(slots)


class _Regrets:
    """Seconds that requests waited for a prefix where it is, by prefix; the longest unused are forgotten."""

    def __init__(self, most: int = 4096) -> None:
        self._seconds: OrderedDict[int, float] = OrderedDict()
        self._most = most

    def add(self, key: int, seconds: float, limit: float) -> bool:
        """Count a wait. Returns True, and begins anew, when all of them together reach `limit`."""
        total = self._seconds.pop(key, 0.0) + seconds
        if total >= limit:
            return True
        self._seconds[key] = total
        if len(self._seconds) > self._most:
            self._seconds.popitem(last=False)
        return False


@register
class LeastLoad:
    """The fewest requests, then the fewest prompt tokens waiting; ties at random. Knows no caches."""

    name: ClassVar[str] = "least_load"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, s: Situation) -> Choice:
        """See `Policy`."""
        requests = np.where(s.allowed, s.requests, np.inf)
        slots = (requests == requests.min()).nonzero()[0]
        if len(slots) > 1:
            wait = s.wait_work.take(slots)
            slots = slots[wait == wait.min()]
        return Choice(int(self._rng.choice(slots.tolist())), "load")


@register
class RoundRobin:
    """Strict rotation over the replicas. Knows neither caches nor load."""

    name: ClassVar[str] = "round_robin"

    def __init__(self, rng: random.Random) -> None:
        self._last = -1

    def choose(self, s: Situation) -> Choice:
        """See `Policy`."""
        slots = s.allowed.nonzero()[0]
        later = slots[slots > self._last]
        self._last = int(later[0] if len(later) else slots[0])
        return Choice(self._last, "round_robin")


def _is_new(s: Situation, pending: npt.NDArray[np.int64], best: int) -> bool:
    """Whether the prefix that `best` is expected to have is still being computed wherever it will be."""
    half = 0.5 * float(s.hit_tokens[best])
    return float(pending[best]) > half > float(((s.hit_tokens - pending) * s.allowed).max())


def _spread(
    s: Situation, pending: npt.NDArray[np.int64], best: int, there_s: Vector, room: npt.NDArray[np.bool_]
) -> npt.NDArray[np.intp]:
    """Where requests are fewest, and then where the answer comes soonest, of the replicas that compute a new
    prefix and a few more that may join them: those that compute nothing now, have free blocks and would need
    at most twice the time."""
    computing = 2 * pending > s.hit_tokens[best]
    able = computing
    if np.count_nonzero(computing) < COPIES:
        able = computing | ((s.wait_work <= 0.0) & room)
    slots = (able & (there_s <= 2.0 * there_s[best])).nonzero()[0]
    requests = s.requests.take(slots)
    slots = slots[requests == requests.min()]
    there_s = there_s.take(slots)
    soonest: npt.NDArray[np.intp] = slots[there_s == there_s.min()]
    return soonest


def _coming(s: Situation, pending: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Tokens of the hit at each replica that are still to be computed there, but are ready elsewhere."""
    ready = s.hit_tokens - pending
    best = int((ready * s.allowed).max())
    missing: npt.NDArray[np.int64] = np.maximum(np.minimum(s.hit_tokens, best) - ready, 0)
    return missing


def _reason(s: Situation, slot: int, tie: bool, by_age: bool) -> str:
    hit = int(s.hit_tokens[slot])
    if hit < s.best_tokens - s.block_size:
        return "load"
    if hit:
        return "in_flight_prefix" if s.pending_tokens is not None and s.pending_tokens[slot] else "prefix"
    if by_age:
        return "age"
    return "tie" if tie else "load"
