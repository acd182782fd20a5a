"""What a page shows of a run, simulated or live, in one form."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from router.lab.client import Outcome
from router.lab.report import Report
from router.lab.sim.measures import Measures

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SIMULATED_FATES = ("hit", "staleness", "routing", "capacity", "workload")
"""What became of prompt tokens (see `router.lab.sim.losses`), in the order in which a page stacks them."""
LIVE_FATES = ("hit", "missed", "workload")
"""What an endpoint's client can tell: `missed` is what a cache that never forgets would have hit besides."""


@dataclass(frozen=True, eq=False)
class Requests:
    """What became of each request that ended well; arrays of one length, times in seconds from the start."""

    arrived_s: Floats
    first_s: Floats
    """When the first token came; NaN where none did."""
    ended_s: Floats
    replica: Ints
    """Index into the run's `replicas`; -1 where it is not known."""
    prompt_tokens: Ints
    cached_tokens: Ints

    @property
    def ttft_s(self) -> Floats:
        """Times to the first token, those of requests that had one."""
        waited = self.first_s - self.arrived_s
        return waited[~np.isnan(waited)]

    @property
    def e2e_s(self) -> Floats:
        """Times to the last token."""
        return self.ended_s - self.arrived_s


@dataclass(frozen=True, eq=False)
class PageRun:
    """One run. `figures` has the keys of a run in `warmroute simulate --json`; None is what is not known."""

    policy: str
    speed: float | None
    figures: Mapping[str, Any]
    requests: Requests
    replicas: Sequence[str]
    fates: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens by what became of them; they add up to all prompt tokens."""
    reasons: Mapping[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Policy and speed."""
        return self.policy if self.speed is None else f"{self.policy} ×{self.speed:g}"


def simulated(measures: Measures, speed: float) -> PageRun:
    """A run that was simulated with a journal."""
    journal = measures.journal
    assert journal is not None
    figures = measures.as_json()
    requests = Requests(
        arrived_s=np.array(journal.arrived_s, np.float64),
        first_s=np.array(journal.first_s, np.float64),
        ended_s=np.array(journal.ended_s, np.float64),
        replica=np.array(journal.replica, np.int64),
        prompt_tokens=np.array(journal.prompt_tokens, np.int64),
        cached_tokens=np.array(journal.cached_tokens, np.int64),
    )
    replicas = [str(number) for number in range(len(figures["requests_per_replica"]))]
    fates = {name: journal.losses.tokens[name] for name in SIMULATED_FATES}
    return PageRun(measures.policy, speed, figures, requests, replicas, fates, journal.reasons)


def live(report: Report) -> PageRun:
    """A replay's outcomes. Of requests that ended well and reported usage; errors are figures only."""
    sent = [outcome for outcome in report.outcomes if outcome.error is None]
    began = min((outcome.start_s for outcome in report.outcomes), default=0.0)
    replicas = list(report.requests_per_replica)
    figures = report.as_json() | {
        "requests_per_replica": list(report.requests_per_replica.values()),
        "refused": sum(report.errors.values()),
    }
    return PageRun(
        policy=report.policy or "live",
        speed=None,
        figures=figures,
        requests=_requests(sent, began, replicas),
        replicas=replicas,
        fates=_live_fates(report),
        reasons=Counter(outcome.reason for outcome in sent if outcome.reason),
    )


def _requests(sent: Sequence[Outcome], began: float, replicas: Sequence[str]) -> Requests:
    index = {name: number for number, name in enumerate(replicas)}
    first = [np.nan if outcome.first_s is None else outcome.first_s for outcome in sent]
    return Requests(
        arrived_s=np.array([outcome.start_s for outcome in sent], np.float64) - began,
        first_s=np.array(first, np.float64) - began,
        ended_s=np.array([outcome.end_s for outcome in sent], np.float64) - began,
        replica=np.array([index.get(outcome.replica or "", -1) for outcome in sent], np.int64),
        prompt_tokens=np.array([outcome.prompt_tokens or 0 for outcome in sent], np.int64),
        cached_tokens=np.array([outcome.cached_tokens or 0 for outcome in sent], np.int64),
    )


def _live_fates(report: Report) -> dict[str, int]:
    """By `LIVE_FATES`; empty where the endpoint does not report cached tokens, or the ideal is not known."""
    if report.cached_tokens is None or report.ideal_hit_rate is None or not report.prompt_tokens:
        return {}
    hit, total = report.cached_tokens, report.prompt_tokens
    ideal = max(hit, round(report.ideal_hit_rate * total))
    return dict(zip(LIVE_FATES, (hit, ideal - hit, total - ideal), strict=True))
