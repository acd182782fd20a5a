"""How simulated requests find their replica.

`PlacedByRouters` is the product: real `Placement` objects, one a router, that learn of caches and load with
the delay of the simulation. The others are what fleets run today in its simplest forms; a policy sees what
its original would see: its own decisions, and what replicas tell it.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Any, Protocol

from kvcore.fingerprint import FingerprintUpdate
from router.errors import QueueFull
from router.lab.errors import OptionError
from router.lab.sim.request import SimRequest
from router.placement import Decision, Placement


class SimPolicy(Protocol):
    """What a fleet asks and tells."""

    def place(self, request: SimRequest) -> int | None:
        """The replica for a request, or None: every queue is full."""

    def started(self, request: SimRequest, epoch: int, seq: int) -> None:
        """A request has its first token."""

    def finished(self, request: SimRequest) -> None:
        """A request is over, or was lost."""

    def heard(self, replica: int, update: FingerprintUpdate | None, load: dict[str, Any]) -> None:
        """What a replica has told, by the time that it reaches the routers."""

    def suspects(self, replica: int) -> bool:
        """Whether the next news of a replica must be all that it holds."""

    def joined(self, replica: int) -> None:
        """A replica may get requests."""

    def left(self, replica: int) -> None:
        """A replica is gone."""


class PlacedByRouters:
    """The product's placement; requests go to the routers in turns."""

    def __init__(
        self, policy: str, block_size: int, routers: int, clock: Callable[[], float], rng: random.Random
    ) -> None:
        self._routers = [
            Placement(
                policy,
                block_size=block_size,
                clock=clock,
                rng=random.Random(rng.random()),
                max_inflight_per_replica=1 << 20,
            )
            for _ in range(routers)
        ]
        self._turn = 0

    def place(self, request: SimRequest) -> int | None:
        """See `SimPolicy`."""
        router = self._routers[self._turn]
        self._turn = (self._turn + 1) % len(self._routers)
        try:
            decision = router.place(request.hashes, len(request.tokens))
        except QueueFull:
            return None
        request.placed = (router, decision)
        return int(decision.replica_id)

    @staticmethod
    def _placed(request: SimRequest) -> tuple[Placement, Decision]:
        assert isinstance(request.placed, tuple)
        return request.placed

    def started(self, request: SimRequest, epoch: int, seq: int) -> None:
        """See `SimPolicy`."""
        router, decision = self._placed(request)
        chunk = {"replica": str(request.replica), "cached_tokens": request.cached_tokens}
        router.on_start(decision, {**chunk, "epoch": epoch, "seq": seq})

    def finished(self, request: SimRequest) -> None:
        """See `SimPolicy`."""
        router, decision = self._placed(request)
        router.finish(decision.reservation)

    def heard(self, replica: int, update: FingerprintUpdate | None, load: dict[str, Any]) -> None:
        """See `SimPolicy`."""
        for router in self._routers:
            router.update(str(replica), update, load)

    def suspects(self, replica: int) -> bool:
        """See `SimPolicy`."""
        return any(router.needs_resync(str(replica)) for router in self._routers)

    def joined(self, replica: int) -> None:
        """See `SimPolicy`."""
        for router in self._routers:
            router.join(str(replica))

    def left(self, replica: int) -> None:
        """See `SimPolicy`."""
        for router in self._routers:
            router.leave(str(replica))


class Blind:
    """Base of policies that know only who is there and what they have sent where themselves."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.alive: list[int] = []
        self.inflight: dict[int, int] = {}

    def place(self, request: SimRequest) -> int | None:
        """See `SimPolicy`."""
        replica = self.choose(request)
        self.inflight[replica] += 1
        return replica

    def choose(self, request: SimRequest) -> int:
        """The replica for a request, one of `alive`."""
        raise AssertionError("every policy chooses in its own way")

    def started(self, request: SimRequest, epoch: int, seq: int) -> None:
        """See `SimPolicy`."""

    def finished(self, request: SimRequest) -> None:
        """See `SimPolicy`."""
        self.inflight[request.replica] -= 1

    def heard(self, replica: int, update: FingerprintUpdate | None, load: dict[str, Any]) -> None:
        """See `SimPolicy`."""

    def suspects(self, replica: int) -> bool:
        """See `SimPolicy`."""
        return False

    def joined(self, replica: int) -> None:
        """See `SimPolicy`."""
        self.alive.append(replica)
        self.inflight.setdefault(replica, 0)

    def left(self, replica: int) -> None:
        """See `SimPolicy`."""
        self.alive.remove(replica)


class Random(Blind):
    """Any replica, each as likely."""

    def choose(self, request: SimRequest) -> int:
        """See `Blind`."""
        return self.rng.choice(self.alive)


class PowerOfTwo(Blind):
    """Of two drawn at random the one with fewer requests (Mitzenmacher, 2001), as Ray Serve does."""

    def choose(self, request: SimRequest) -> int:
        """See `Blind`."""
        pair = self.rng.sample(self.alive, min(2, len(self.alive)))
        return min(pair, key=self.inflight.__getitem__)


class Session(Blind):
    """Every turn of a session to the same replica, by rendezvous hashing; requests without one anywhere."""

    def choose(self, request: SimRequest) -> int:
        """See `Blind`."""
        if request.session is None:
            return self.rng.choice(self.alive)
        key = request.session.encode()
        return max(self.alive, key=lambda replica: _weight(key, replica))


class BoundedLoads(Blind):
    """Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018) by 2 blocks of prefix:
    the first replica in the key's order whose requests in flight stay below 1.25 times the mean."""

    bound = 1.25

    def choose(self, request: SimRequest) -> int:
        """See `Blind`."""
        key = request.hashes[:2][-1:].tobytes()
        limit = self.bound * (sum(self.inflight[replica] for replica in self.alive) + 1) / len(self.alive)
        ordered = sorted(self.alive, key=lambda replica: _weight(key, replica), reverse=True)
        return next((replica for replica in ordered if self.inflight[replica] + 1 <= limit), ordered[0])


def _weight(key: bytes, replica: int) -> bytes:
    return hashlib.blake2b(key, digest_size=8, salt=replica.to_bytes(8, "little")).digest()


PLACED = ("cache_aware", "least_load", "round_robin")
BLIND: dict[str, type[Blind]] = {
    "random": Random,
    "power_of_two": PowerOfTwo,
    "session": Session,
    "chwbl": BoundedLoads,
}


def make_policy(
    name: str, block_size: int, routers: int, clock: Callable[[], float], rng: random.Random
) -> SimPolicy:
    """A policy by name. Raises `OptionError` for an unknown one."""
    if name in PLACED:
        return PlacedByRouters(name, block_size, routers, clock, rng)
    if name in BLIND:
        return BLIND[name](rng)
    raise OptionError(f"unknown policy {name!r}; known: {', '.join((*PLACED, *BLIND))}")
