"""Base of policies that hear of caches block by block, and of load: what KV events and metrics bring."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from kvcore.events import BlocksRemoved, BlocksStored, Cleared
from router.lab.sim.policies.base import Blind, News
from router.lab.sim.request import SimRequest


class Informed(Blind):
    """Knows the blocks of every cache and its load as of the last news, and counts prefills on their way.

    `pending` is the prompt tokens of each replica that were not predicted to hit, from the decision until the
    first token: a router that all traffic passes counts them itself.
    """

    wants = "events"

    def __init__(self, rng: random.Random, clock: Callable[[], float], block_size: int) -> None:
        super().__init__(rng, clock, block_size)
        self.loads: dict[int, dict[str, Any]] = {}
        self.pending: dict[int, int] = {}
        self._resident: dict[int, set[int]] = {}

    def place(self, request: SimRequest) -> int | None:
        """See `SimPolicy`."""
        replica = self.choose(request)
        cached = self.cached_blocks(replica, request.hashes.tolist()) * self.block_size
        request.placed = len(request.tokens) - cached
        self.pending[replica] += request.placed
        self.inflight[replica] += 1
        return replica

    def cached_blocks(self, replica: int, hashes: Sequence[int]) -> int:
        """Blocks of a prompt, from its beginning, that a replica held by its last news."""
        return leading(hashes, self._resident[replica])

    def least(self, scores: dict[int, float]) -> int:
        """A replica with the lowest score, each as likely."""
        lowest = min(scores.values())
        return self.rng.choice([replica for replica, score in scores.items() if score == lowest])

    def started(self, request: SimRequest, epoch: int, seq: int) -> None:
        """See `SimPolicy`."""
        self._prefilled(request)

    def finished(self, request: SimRequest) -> None:
        """See `SimPolicy`."""
        self._prefilled(request)
        super().finished(request)

    def heard(self, replica: int, news: News) -> None:
        """See `SimPolicy`."""
        self.loads[replica] = news.load
        resident = self._resident[replica]
        for event in news.events:
            if isinstance(event, BlocksStored):
                resident.update(event.hashes.tolist())
            elif isinstance(event, BlocksRemoved):
                resident.difference_update(event.hashes.tolist())
            elif isinstance(event, Cleared):
                resident.clear()

    def joined(self, replica: int) -> None:
        """See `SimPolicy`."""
        super().joined(replica)
        self._resident[replica] = set()
        self.pending.setdefault(replica, 0)

    def left(self, replica: int) -> None:
        """See `SimPolicy`."""
        super().left(replica)
        self._resident[replica] = set()

    def _prefilled(self, request: SimRequest) -> None:
        if isinstance(request.placed, int):
            self.pending[request.replica] -= request.placed
            request.placed = None


def leading(hashes: Sequence[int], known: "set[int] | dict[int, int]") -> int:
    """How many hashes from the beginning are known."""
    count = 0
    for value in hashes:
        if value not in known:
            break
        count += 1
    return count
