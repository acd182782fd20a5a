"""Prometheus metrics of one router process, in a registry of their own.

Labels are endpoints, statuses, replicas and reasons. Prompts, salts, keys and tenants never appear.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.placement import Placement
from router.stream import DispatchObserver

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_SHORT_SECONDS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
_TOKENS = tuple(float(1 << k) for k in range(0, 18))


class Metrics(DispatchObserver):
    """Counts requests at the API and attempts at the dispatcher; load figures are read when scraped."""

    def __init__(self, placement: Placement) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Fleet(placement))
        self._requests_and_times()
        self._hits()
        self._faults()

    def _requests_and_times(self) -> None:
        registry = self.registry
        self.requests = Counter(
            "warmroute_requests", "Requests by outcome.", ["endpoint", "status"], registry=registry
        )
        self.ttft = Histogram(
            "warmroute_ttft_seconds", "From arrival to the first token.", buckets=_SECONDS, registry=registry
        )
        self.e2e = Histogram(
            "warmroute_e2e_seconds", "From arrival to the end.", buckets=_SECONDS, registry=registry
        )
        self.prompt_tokens = Histogram(
            "warmroute_prompt_tokens", "Tokens of a prompt.", buckets=_TOKENS, registry=registry
        )
        self.completion_tokens = Histogram(
            "warmroute_completion_tokens",
            "Tokens drawn for a prompt, those of answers that were not the best included.",
            buckets=_TOKENS,
            registry=registry,
        )

        self.routing = Histogram(
            "warmroute_routing_seconds",
            "Hashing, choosing and reserving.",
            buckets=_SHORT_SECONDS,
            registry=registry,
        )

    def _hits(self) -> None:
        registry = self.registry
        self.predicted = Counter(
            "warmroute_predicted_hit_tokens", "Prompt tokens expected in a cache.", registry=registry
        )
        self.cached = Counter(
            "warmroute_cached_tokens", "Prompt tokens really found in a cache.", registry=registry
        )
        self.over = Counter(
            "warmroute_overpredicted_tokens",
            "Tokens expected in a cache and not found, per request.",
            registry=registry,
        )
        self.under = Counter(
            "warmroute_underpredicted_tokens",
            "Tokens found in a cache and not expected, per request.",
            registry=registry,
        )

    def _faults(self) -> None:
        registry = self.registry
        self.retries = Counter(
            "warmroute_retries", "Attempts that were followed by another.", ["reason"], registry=registry
        )
        self.aborts = Counter("warmroute_aborts", "Requests given up before their end.", registry=registry)
        self.replicas_lost = Counter(
            "warmroute_replica_losses",
            "Requests without a token yet that found their replica gone.",
            registry=registry,
        )
        self.close_failures = Counter(
            "warmroute_close_failures", "Abandoned calls that did not end in time.", registry=registry
        )
        self.internal_errors = Counter(
            "warmroute_internal_errors", "Exceptions nobody expected.", registry=registry
        )

    def routed(self, seconds: float) -> None:
        """A decision took so long."""
        self.routing.observe(seconds)

    def started(self, predicted_tokens: int, cached_tokens: int) -> None:
        """A replica started a request."""
        self.predicted.inc(predicted_tokens)
        self.cached.inc(cached_tokens)
        self.over.inc(max(0, predicted_tokens - cached_tokens))
        self.under.inc(max(0, cached_tokens - predicted_tokens))

    def retried(self, reason: str) -> None:
        """Another attempt follows."""
        self.retries.labels(reason).inc()

    def aborted(self) -> None:
        """A request was given up."""
        self.aborts.inc()

    def lost(self, replica_id: str) -> None:
        """A replica is gone."""
        self.replicas_lost.inc()

    def close_failed(self) -> None:
        """A call to a replica could not be closed."""
        self.close_failures.inc()

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)


class _Fleet:
    """Placement's own figures, read at scrape time."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def collect(self) -> Iterator[Metric]:
        """Load and knowledge by replica, and what placement counted."""
        yield from self._load()
        yield from self._reported()
        yield from self._knowledge()
        yield from self._counters()

    def _load(self) -> Iterator[Metric]:
        stats = self._placement.stats()
        yield _gauge("warmroute_replicas", "Replicas known.", {None: len(stats)})
        figures = {
            "queued_requests": "Requests waiting for their first token.",
            "running_requests": "Requests being answered.",
            "queued_tokens": "Prompt tokens yet to be computed.",
            "running_tokens": "Prompt tokens of the requests being answered, once for each of their choices.",
            "choices": "Answers being drawn for the requests: best_of, else n, for each.",
        }
        for name, text in figures.items():
            values = {replica: row[name] for replica, row in stats.items()}
            yield _gauge(f"warmroute_replica_{name}", text, values)
        inflight = {r: row["queued_requests"] + row["running_requests"] for r, row in stats.items()}
        yield _gauge("warmroute_replica_inflight", "Requests at a replica, sent by this router.", inflight)

    def _reported(self) -> Iterator[Metric]:
        reports = self._placement.reports()
        figures = {
            "free_blocks": ("free", "KV blocks that hold nothing."),
            "cached_blocks": ("cached", "KV blocks that hold a prefix nobody is using."),
            "held_blocks": ("held", "KV blocks that running requests use."),
            "prefill_tokens_per_second": (
                "prefill_tokens_per_s",
                "Prefill rate, as the replica measures it.",
            ),
            "decode_step_seconds": ("decode_step_s", "Time of a decode step, as the replica measures it."),
        }
        for name, (key, text) in figures.items():
            values = {replica: float(report[key]) for replica, report in reports.items() if key in report}
            yield _gauge(f"warmroute_replica_{name}", text, values)

    def _knowledge(self) -> Iterator[Metric]:
        known = self._placement.knowledge()
        ages = {replica: stats.age_s for replica, stats in known.items()}
        yield _gauge("warmroute_fingerprint_age_seconds", "Since the last cache update.", ages)
        repairs = {replica: stats.gaps + stats.mismatches for replica, stats in known.items()}
        yield _gauge("warmroute_fingerprint_repairs", "Updates that needed a snapshot.", repairs)

    def _counters(self) -> Iterator[Metric]:
        counters = self._placement.counters
        placed = CounterMetricFamily("warmroute_placements", "Decisions by reason.", labels=["reason"])
        for reason, count in counters.placed.items():
            placed.add_metric([reason], count)
        yield placed
        totals = {
            "not_best": ("Decisions for a replica without the longest hit.", counters.not_best),
            "given_up_tokens": ("Hit tokens those decisions gave up.", counters.lost_tokens),
            "queue_full": ("Requests refused since every replica was at its limit.", counters.queue_full),
            "suspected": ("Fingerprints that promised too much.", counters.suspected),
        }
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(f"warmroute_placement_{name}", text, value=value)


def _gauge(name: str, text: str, values: Mapping[None, float] | Mapping[str, float]) -> Metric:
    """One gauge, by replica; the key None is for a figure without labels."""
    family = GaugeMetricFamily(name, text, labels=[] if None in values else ["replica"])
    for replica, value in values.items():
        family.add_metric([] if replica is None else [replica], value)
    return family
