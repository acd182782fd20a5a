"""What a report wants to know of a simulated run beside its figures: each request, and where hit was lost."""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from kvcore.cache import PrefixCache
from router.lab.sim.losses import Losses
from router.lab.sim.request import SimRequest


class Journal:
    """Seven numbers for each request that was served, in the order in which they ended; times in seconds."""

    def __init__(self, block_size: int) -> None:
        self.losses = Losses(block_size)
        self.reasons: Counter[str] = Counter()
        """Decisions by the reason that the policy gave; empty for policies that give none."""
        self.arrived_s, self.first_s, self.ended_s = array("d"), array("d"), array("d")
        self.replica, self.prompt_tokens, self.cached_tokens = array("l"), array("l"), array("l")

    def placed(self, request: SimRequest, caches: Mapping[int, PrefixCache]) -> None:
        """A request has its replica; nothing of it has reached the replica yet."""
        self.losses.placed(request, caches)
        if request.decision is not None:
            self.reasons[request.decision.reason] += 1

    def lost(self, requests: Iterable[SimRequest]) -> None:
        """A replica died with these."""
        self.losses.lost(requests)

    def ended(self, request: SimRequest, now: float) -> None:
        """A request was served."""
        self.losses.ended(request)
        self.arrived_s.append(request.arrived_at)
        self.first_s.append(request.first_at)
        self.ended_s.append(now)
        self.replica.append(request.replica)
        self.prompt_tokens.append(len(request.tokens))
        self.cached_tokens.append(request.cached_tokens)

    def finish(self) -> None:
        """The run is over: forget what only further requests would need."""
        self.losses.finish()

    def as_json(self) -> dict[str, Any]:
        """Prompt tokens by what became of them (see `losses`), and decisions by reason."""
        return {"prompt_tokens_by_fate": self.losses.tokens, "reasons": dict(self.reasons)}
