"""The scorers of llm-d's inference scheduler ("precise prefix cache aware" configuration).

The endpoint of the highest sum gets the request, ties at random (max-score-picker):

    3 * precise-prefix-cache-scorer + 2 * kv-cache-utilization-scorer + 2 * queue-scorer

- precise prefix: blocks of the prompt that are resident from its beginning, by KV events, scaled so that the
  least and the most of the endpoints with any lie at 0 and 1; 1 if they are all the same, 0 without any
  (llm-d-inference-scheduler/pkg/plugins/scorer/precise_prefix_cache.go and utils.go);
- KV-cache utilization: 1 - the share of blocks that running requests hold;
- queue: waiting requests, scaled: the longest queue is 0, the shortest 1, all 1 if they are the same
  (gateway-api-inference-extension/pkg/epp/scheduling/framework/plugins/scorer/queue.go).

Load is what endpoints last reported, with nothing added for requests sent since, as in the original: it polls
every 50 ms, here it comes with the simulation's event delay. Not here: the approximate prefix scorer of other
configurations, flow control, saturation detection, disaggregation.
"""

from router.lab.sim.policies.informed import Informed
from router.lab.sim.request import SimRequest


class LlmD(Informed):
    """See the module docstring."""

    prefix_weight = 3.0
    utilization_weight = 2.0
    queue_weight = 2.0

    def choose(self, request: SimRequest) -> int:
        """See `Blind`."""
        prefix, queue = self._prefix_scores(request), self._queue_scores()
        return self.least(
            {
                replica: -self.prefix_weight * prefix[replica]
                - self.utilization_weight * self._free_share(replica)
                - self.queue_weight * queue[replica]
                for replica in self.alive
            }
        )

    def _prefix_scores(self, request: SimRequest) -> dict[int, float]:
        hashes = request.hashes.tolist()
        blocks = {replica: self.cached_blocks(replica, hashes) for replica in self.alive}
        some = [count for count in blocks.values() if count]
        if not some:
            return dict.fromkeys(blocks, 0.0)
        low, high = min(some), max(some)
        return {replica: _scaled(count, low, high) if count else 0.0 for replica, count in blocks.items()}

    def _queue_scores(self) -> dict[int, float]:
        waiting = {replica: self.loads[replica]["waiting"] for replica in self.alive}
        low, high = min(waiting.values()), max(waiting.values())
        return {replica: _scaled(-count, -high, -low) for replica, count in waiting.items()}

    def _free_share(self, replica: int) -> float:
        load = self.loads[replica]
        return float(1 - load["held"] / load["num_blocks"])


def _scaled(value: int, low: int, high: int) -> float:
    return 1.0 if low == high else (value - low) / (high - low)
