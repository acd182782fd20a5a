"""What a simulation measures: hit rate, latencies, load."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from router.lab.sim.journal import Journal
from router.lab.sim.replica import SimReplica
from router.lab.sim.request import SimRequest


class Measures:
    """Figures of one run; `as_json` has the keys that `warmroute simulate --json` documents.

    Whoever wants a report sets `journal` before the run; it costs time and memory, so it is None else.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.refused = 0
        self.moved = 0  # requests that lost their replica and were placed again
        self.journal: Journal | None = None
        self.per_replica: Counter[int] = Counter()
        self.ttft_s: list[float] = []  # by the order in which requests ended
        self._tpot: list[float] = []
        self._e2e: list[float] = []
        self._prompt = self._cached = self._loaded = 0
        self._decide: list[float] = []
        self._sim_s = self._wall_s = 0.0
        self._busy: list[float] = []

    def decided(self, seconds: float) -> None:
        """A decision took so long, in real time."""
        self._decide.append(seconds)

    def placed(self, request: SimRequest, replicas: Sequence[SimReplica], alive: Collection[int]) -> None:
        """A request has its replica, which does not know of it yet; `alive` are those that take requests."""
        if self.journal is not None:
            self.journal.placed(request, {number: replicas[number].cache for number in alive})

    def lost(self, requests: Sequence[SimRequest]) -> None:
        """A replica has died with these requests, which nobody else has yet."""
        if self.journal is not None:
            self.journal.lost(requests)

    def add(self, request: SimRequest, now: float) -> None:
        """A request has ended."""
        if self.journal is not None:
            self.journal.ended(request, now)
        self.per_replica[request.replica] += 1
        self._prompt += len(request.tokens)
        self._cached += request.cached_tokens
        self._loaded += request.loaded_tokens
        self.ttft_s.append(request.first_at - request.arrived_at)
        self._e2e.append(now - request.arrived_at)
        if request.answer_tokens > 1:
            self._tpot.append((now - request.first_at) / (request.answer_tokens - 1))

    def finish(self, sim_s: float, wall_s: float, busy_s: list[float]) -> None:
        """The simulation is over."""
        self._sim_s, self._wall_s, self._busy = sim_s, wall_s, busy_s
        if self.journal is not None:
            self.journal.finish()

    @property
    def hit_rate(self) -> float:
        """Cached over prompt tokens."""
        return self._cached / max(self._prompt, 1)

    def as_json(self) -> dict[str, Any]:
        """One entry of `runs`."""
        busy = np.array(self._busy)
        return {
            "policy": self.policy,
            "requests": len(self.ttft_s),
            "refused": self.refused,
            "moved": self.moved,
            "hit_rate": self.hit_rate,
            "loaded_rate": self._loaded / max(self._prompt, 1),
            "ttft_ms": spread(self.ttft_s),
            "tpot_ms": spread(self._tpot),
            "e2e_ms": spread(self._e2e),
            "imbalance": float(busy.max() / busy.mean()) if busy.any() else 1.0,
            "requests_per_replica": [self.per_replica[number] for number in range(len(self._busy))],
            "sim_seconds": self._sim_s,
            "wall_seconds": self._wall_s,
            "decide_us": float(np.median(self._decide) * 1e6) if self._decide else 0.0,
            **({} if self.journal is None else self.journal.as_json()),
        }


def spread(times: Iterable[float]) -> dict[str, float | None]:
    """Mean and percentiles of seconds, in ms; None where there are none."""
    seconds = list(times)
    if not seconds:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    values = np.array(seconds) * 1000
    spread = {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}
    return {"mean": float(values.mean()), **spread}
