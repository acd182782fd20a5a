"""What a simulated fleet asks and tells its policy, and the base of policies that see only their traffic."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from kvcore.events import Event
from kvcore.fingerprint import FingerprintUpdate
from router.lab.sim.request import SimRequest


class News(NamedTuple):
    """What a replica tells: the changes of its cache since its last news, twice, and its load now.

    `update` is the changes as a fingerprint (None: there are none), `events` the same block by block, and
    `load` the figures of a LoadReport.
    """

    update: FingerprintUpdate | None
    events: list[Event]
    load: dict[str, Any]


class SimPolicy(Protocol):
    """What a fleet asks and tells.

    `wants` says what of `News` is read, which saves time: "nothing", "load", "events" too, or "fingerprint".
    """

    wants: str

    def place(self, request: SimRequest) -> int | None:
        """The replica for a request, or None: every queue is full."""

    def started(self, request: SimRequest, epoch: int, seq: int) -> None:
        """A request has its first token."""

    def finished(self, request: SimRequest) -> None:
        """A request is over, or was lost."""

    def heard(self, replica: int, news: News) -> None:
        """What a replica has told, by the time that it reaches the routers."""

    def suspects(self, replica: int) -> bool:
        """Whether the next news of a replica must be all that it holds."""

    def joined(self, replica: int) -> None:
        """A replica may get requests; its first news follow before the next request."""

    def left(self, replica: int) -> None:
        """A replica is gone."""


class Blind:
    """Base of policies that know only who is there and what they have sent where themselves."""

    wants = "nothing"

    def __init__(self, rng: random.Random, clock: Callable[[], float], block_size: int) -> None:
        self.rng, self.clock, self.block_size = rng, clock, block_size
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

    def heard(self, replica: int, news: News) -> None:
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
