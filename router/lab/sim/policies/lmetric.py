"""LMetric (Zhang et al., "Simple is Better - Multiplication May Be All You Need for LLM Request Scheduling",
arXiv 2603.15202, 2026).

The instance of the least product gets the request, ties at random:

    (prefill tokens on their way + the request's tokens that would not hit) * batch size

No parameters. Batch size counts the requests that are not finished and the new one: as in the port to
SGLang's gateway (sgl-model-gateway/src/policies/lmetric.rs), lest all idle instances score 0, whatever they
hold. Residency is exact, by cache events.

Not here: the detection of the rare workloads for which the paper says that a product fails.
"""

from router.lab.sim.policies.informed import Informed
from router.lab.sim.request import SimRequest


class LMetric(Informed):
    """See the module docstring."""

    def choose(self, request: SimRequest) -> int:
        """See `Blind`."""
        hashes = request.hashes.tolist()
        return self.least({replica: self._score(replica, request, hashes) for replica in self.alive})

    def _score(self, replica: int, request: SimRequest, hashes: list[int]) -> int:
        uncached = len(request.tokens) - self.cached_blocks(replica, hashes) * self.block_size
        return (self.pending[replica] + uncached) * (self.inflight[replica] + 1)
