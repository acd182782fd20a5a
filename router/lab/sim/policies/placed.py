"""The product: real `Placement` objects, one a router, that learn of caches and load as in a fleet."""

import random
from collections.abc import Callable

from router.errors import QueueFull
from router.lab.sim.policies.base import News
from router.lab.sim.request import SimRequest
from router.placement import Decision, Placement


class PlacedByRouters:
    """The product's placement; requests go to the routers in turns."""

    def __init__(
        self, policy: str, block_size: int, routers: int, clock: Callable[[], float], rng: random.Random
    ) -> None:
        self.wants = "fingerprint" if policy == "cache_aware" else "load"
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
        request.placed, request.decision = (router, decision), decision
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

    def heard(self, replica: int, news: News) -> None:
        """See `SimPolicy`."""
        for router in self._routers:
            router.update(str(replica), news.update, news.load)

    def suspects(self, replica: int) -> bool:
        """See `SimPolicy`."""
        name = str(replica)
        return any([router.needs_resync(name) for router in self._routers])

    def joined(self, replica: int) -> None:
        """See `SimPolicy`."""
        for router in self._routers:
            router.join(str(replica))

    def left(self, replica: int) -> None:
        """See `SimPolicy`."""
        for router in self._routers:
            router.leave(str(replica))
