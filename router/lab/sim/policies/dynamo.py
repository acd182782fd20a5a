"""The KV router of NVIDIA Dynamo (lib/kv-router/src/scheduling/selector and config.rs, 1.x).

The worker of the least cost gets the request, ties at random (router temperature 0):

    prefill_load_scale * max(0, prefill blocks - overlap_score_credit * overlap blocks) + decode blocks

with both weights 1.0 by default (together the `overlap_score_weight` of earlier versions). Prefill blocks are
the tokens still to be prefilled on the worker, until their first tokens come, and the whole prompt, in
blocks, with fractions; overlap is what KV events say. Decode blocks are the distinct full prompt blocks of
the worker's active requests with those of this one; answers are not tracked (`router_track_output_blocks` is
off). A test holds the costs to those that 1.6.1 logs.

Not here: what 1.6.1 has off by default (the decay of overlap credit, a weight of active requests, the
router's own queue: `router_queue_threshold`, which earlier versions set to 2 to 16 full steps of prefill),
lower cache tiers and their weights, and prefill/decode disaggregation.
"""

import random
from collections import Counter
from collections.abc import Callable

from router.lab.sim.policies.informed import Informed, leading
from router.lab.sim.request import SimRequest


class Dynamo(Informed):
    """See the module docstring."""

    prefill_load_scale = 1.0
    overlap_score_credit = 1.0

    def __init__(self, rng: random.Random, clock: Callable[[], float], block_size: int) -> None:
        super().__init__(rng, clock, block_size)
        self._active: dict[int, Counter[int]] = {}

    def place(self, request: SimRequest) -> int | None:
        """See `SimPolicy`."""
        replica = super().place(request)
        assert replica is not None
        self._active[replica].update(request.hashes.tolist())
        return replica

    def choose(self, request: SimRequest) -> int:
        """See `Blind`."""
        return self.least(self.costs(request))

    def costs(self, request: SimRequest) -> dict[int, float]:
        """The cost of a request on every replica, in blocks."""
        hashes = request.hashes.tolist()
        return {replica: self._cost(replica, request, hashes) for replica in self.alive}

    def finished(self, request: SimRequest) -> None:
        """See `SimPolicy`."""
        super().finished(request)
        active = self._active[request.replica]
        for value in request.hashes.tolist():
            active[value] -= 1
            if not active[value]:
                del active[value]

    def joined(self, replica: int) -> None:
        """See `SimPolicy`."""
        super().joined(replica)
        self._active.setdefault(replica, Counter())

    def _cost(self, replica: int, request: SimRequest, hashes: list[int]) -> float:
        active = self._active[replica]
        prefill = (self.pending[replica] + len(request.tokens)) / self.block_size
        credit = self.overlap_score_credit * self.cached_blocks(replica, hashes)
        decode = len(active) + len(hashes) - leading(hashes, active)
        return self.prefill_load_scale * max(0.0, prefill - credit) + decode
