"""What a replay measured: figures, their JSON, and the table.

Latencies are those of requests that ended well. Percentiles interpolate linearly between the nearest samples
(numpy's default, type 7 of Hyndman and Fan, 1996). Where there is no sample there is None, never NaN.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from router.lab.client import Outcome

JSON_KEYS = (
    "requests",
    "errors",
    "prompt_tokens",
    "cached_tokens",
    "hit_rate",
    "ideal_hit_rate",
    "ttft_ms",
    "tpot_ms",
    "e2e_ms",
    "requests_per_replica",
    "duration_s",
    "policy",
)
OVER_CONTEXT = "over_context"
"""The kind of error of requests that were too long to be sent."""
_BEATS_IDEAL = (
    "A hit rate above the ideal: the ideal begins with an empty cache, and this endpoint had seen some of\n"
    "these prompts before, from an earlier replay or other traffic (or it has no POST /tokenize, and the\n"
    "ideal is an estimate)."
)


@dataclass(frozen=True)
class Summary:
    """Mean and percentiles of a set of samples, in their unit; all None where there was no sample."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """Summarize any number of finite samples."""
        if not samples:
            return cls()
        p50, p90, p99 = (float(p) for p in np.percentile(samples, (50, 90, 99)))
        return cls(float(np.mean(samples)), p50, p90, p99)


@dataclass(frozen=True)
class Report:
    """One replay. The fields up to `policy` are the JSON's keys.

    `requests` counts all that were sent, and those not sent because they were too long (errors
    `over_context`); `requests - sum(errors.values())` ended well. Tokens are of those that ended well and
    reported usage; `cached_tokens` and `hit_rate` are None if the endpoint never reported cached tokens.
    """

    requests: int
    errors: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int | None
    hit_rate: float | None
    ideal_hit_rate: float | None
    ttft_ms: Summary
    tpot_ms: Summary
    e2e_ms: Summary
    requests_per_replica: Mapping[str, int]
    duration_s: float
    policy: str | None = None
    interrupted: bool = False
    notes: tuple[str, ...] = ()
    outcomes: Sequence[Outcome] = field(default=(), repr=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        """Exactly the keys of `JSON_KEYS`, ready for `json.dumps`."""
        return {name: _plain(getattr(self, name)) for name in JSON_KEYS}

    @property
    def failed(self) -> int:
        """Requests that were sent and did not end well."""
        return sum(count for kind, count in self.errors.items() if kind != OVER_CONTEXT)

    @property
    def beats_ideal(self) -> bool:
        """Whether more was cached than this replay alone can explain."""
        known = self.hit_rate is not None and self.ideal_hit_rate is not None
        return known and round((self.hit_rate or 0) - (self.ideal_hit_rate or 0), 3) > 0

    @property
    def failed_entirely(self) -> bool:
        """Whether not one request ended well."""
        return sum(self.errors.values()) >= self.requests


def _plain(value: Any) -> Any:
    if isinstance(value, Summary):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else value


def summarize(
    outcomes: Sequence[Outcome],
    ideal_hit_rate: float | None,
    *,
    over_context: int = 0,
    policy: str | None = None,
    interrupted: bool = False,
) -> Report:
    """The report of all requests that were sent, and of `over_context` that were not."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    counted = [outcome for outcome in good if outcome.prompt_tokens is not None]
    prompt_tokens = sum(outcome.prompt_tokens or 0 for outcome in counted)
    reported = any(outcome.cached_tokens is not None for outcome in counted)
    cached = sum(outcome.cached_tokens or 0 for outcome in counted) if reported else None
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    if over_context:
        errors[OVER_CONTEXT] += over_context
    return Report(
        requests=len(outcomes) + over_context,
        errors=dict(sorted(errors.items())),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached,
        hit_rate=cached / prompt_tokens if cached is not None and prompt_tokens else None,
        ideal_hit_rate=ideal_hit_rate,
        ttft_ms=Summary.of([1e3 * t for t in map(_ttft_s, good) if t is not None]),
        tpot_ms=Summary.of([1e3 * t for t in map(_tpot_s, good) if t is not None]),
        e2e_ms=Summary.of([1e3 * (outcome.end_s - outcome.start_s) for outcome in good]),
        requests_per_replica=dict(
            sorted(Counter(o.replica for o in outcomes if o.replica is not None).items())
        ),
        duration_s=_duration_s(outcomes),
        policy=policy,
        interrupted=interrupted,
        notes=_notes(outcomes),
        outcomes=outcomes,
    )


def _ttft_s(outcome: Outcome) -> float | None:
    return None if outcome.first_s is None else outcome.first_s - outcome.start_s


def _tpot_s(outcome: Outcome) -> float | None:
    """Time per output token after the first; chunks stand in for tokens where usage does not count them."""
    tokens = outcome.pieces if outcome.completion_tokens is None else outcome.completion_tokens
    if outcome.first_s is None or outcome.last_s is None or tokens < 2:
        return None
    return (outcome.last_s - outcome.first_s) / (tokens - 1)


def _duration_s(outcomes: Sequence[Outcome]) -> float:
    if not outcomes:
        return 0.0
    return max(outcome.end_s for outcome in outcomes) - min(outcome.start_s for outcome in outcomes)


def _notes(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """One example of each kind of error."""
    examples: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.error is not None and outcome.detail:
            examples.setdefault(outcome.error, outcome.detail)
    return tuple(f"{kind}: {detail}" for kind, detail in sorted(examples.items()))


def write_json(value: Any) -> str:
    """JSON text with a line end; refuses NaN."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def report_table(reports: Sequence[Report]) -> Table:
    """A row per report: what `warmroute replay` and `warmroute demo` print. Fits 80 columns."""
    failures = any(report.errors for report in reports)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("policy", vertical="bottom", no_wrap=True)
    for name in ("hit\nrate", "\nideal", "TTFT ms\nmean", "\np50", "\np99", "TPOT\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("requests\nper replica", overflow="fold", min_width=11)
    if failures:
        table.add_column("\nfailed", justify="right", no_wrap=True)
    for report in reports:
        failed = [str(sum(report.errors.values()))] if failures else []
        table.add_row(*_cells(report), *failed)
    if any(report.beats_ideal for report in reports):
        table.caption, table.caption_justify = _BEATS_IDEAL, "left"
    return table


def _cells(report: Report) -> list[str]:
    ttft = report.ttft_ms
    return [
        report.policy or "-",
        _percent(report.hit_rate),
        _percent(report.ideal_hit_rate),
        *(_milliseconds(value) for value in (ttft.mean, ttft.p50, ttft.p99, report.tpot_ms.mean)),
        " / ".join(map(str, report.requests_per_replica.values())) or str(report.requests),
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
