"""Who gets the request: policies are small classes, registered by name, that rank replicas as vectors.

`cache_aware` (the default) predicts for every replica, in seconds::

    cost = wait / rate + BETA * miss / rate + HORIZON * step * requests

wait: prompt tokens to be computed there first; miss: tokens of this prompt that are not cached there; rate:
prefill tokens/s; step: what each request there adds to a decode step; requests: those there now. Recomputed
tokens weigh BETA times, because a spilled prefill is work that somebody else waits for, and evicts
blocks that somebody else needs. An *idle* replica's work delays nobody: one that had nothing to do for BETA
times as long as it takes to compute the prompt, and would be done with it before the best replica's queue
even lets it begin, gets the request. Waiting for one's own prefix, being computed there, does not count.

Among replicas of nearly the same cost the one whose next eviction victim is oldest is taken, which makes
separate LRU caches behave like one large one; what is still equal is drawn at random.
"""

import random
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from router.errors import UnknownPolicy
from router.loads import Loads

Vector = npt.NDArray[np.float64]

_NO_SLOTS = np.empty(0, dtype=np.intp)

BETA = 4.0
"""Seconds of waiting that one second of recomputing weighs."""
NEAR = 0.1
"""Costs that differ by less than this part of the time to compute the whole prompt count as equal."""


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
    num_tokens: int
    block_size: int
    loads: Loads
    now: float


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

    def choose(self, s: Situation) -> Choice:
        """See `Policy`."""
        loads = s.loads
        wait = loads.wait_tokens(s.now)
        miss = s.num_tokens - s.hit_tokens
        requests = loads.requests()
        cost = (wait + BETA * miss) * loads.token_s
        cost += loads.horizon_s * requests
        cost = np.where(s.allowed, cost, np.inf)
        best = int(cost.argmin())
        if wait[best] > 0.0:
            slots = self._idle(s, best, wait, miss, requests)
            if len(slots):
                return Choice(self._oldest(s, slots, miss)[0], "load", cost)
        near_s = NEAR * s.num_tokens * float(loads.token_s[best])
        slots = (cost <= cost[best] + near_s).nonzero()[0]
        slot, by_age = (best, False) if len(slots) == 1 else self._oldest(s, slots, miss)
        return Choice(slot, _reason(s, slot, len(slots) > 1, by_age), cost)

    def _idle(
        self, s: Situation, best: int, wait: Vector, miss: npt.NDArray[np.int64], requests: Vector
    ) -> npt.NDArray[np.intp]:
        """Idle replicas, of equal speed, that compute the prompt while `best` makes it wait; often none."""
        idle = s.allowed & (requests == 0.0)
        if not np.count_nonzero(idle):
            return _NO_SLOTS
        token_s = s.loads.token_s
        own = 0 if s.pending_tokens is None else int(s.pending_tokens[best])
        wait_s = (float(wait[best]) - own) * float(token_s[best])
        recompute_s = miss * token_s
        idle &= s.now - s.loads.busy_at >= BETA * recompute_s
        there_s = np.where(idle, recompute_s, np.inf)
        least_s = float(there_s.min())
        return (there_s <= least_s).nonzero()[0] if least_s < wait_s else _NO_SLOTS

    def _oldest(
        self, s: Situation, slots: npt.NDArray[np.intp], miss: npt.NDArray[np.int64]
    ) -> tuple[int, bool]:
        """Of some slots the one with the oldest eviction victim, and whether that alone decided."""
        blocks = np.ceil(miss.take(slots) / s.block_size)
        ages = s.loads.victim_ages(slots, blocks, s.now)
        oldest = slots[ages == ages.max()]
        return int(self._rng.choice(oldest.tolist())), len(oldest) < len(slots)


@register
class LeastLoad:
    """The fewest requests, then the fewest prompt tokens waiting; ties at random. Knows no caches."""

    name: ClassVar[str] = "least_load"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, s: Situation) -> Choice:
        """See `Policy`."""
        requests = np.where(s.allowed, s.loads.requests(), np.inf)
        slots = (requests == requests.min()).nonzero()[0]
        if len(slots) > 1:
            wait = s.loads.wait_tokens(s.now).take(slots)
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


def _reason(s: Situation, slot: int, tie: bool, by_age: bool) -> str:
    hit = int(s.hit_tokens[slot])
    if hit < s.best_tokens - s.block_size:
        return "load"
    if hit:
        return "in_flight_prefix" if s.pending_tokens is not None and s.pending_tokens[slot] else "prefix"
    if by_age:
        return "age"
    return "tie" if tie else "load"


