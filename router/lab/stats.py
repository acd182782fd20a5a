"""What a trace is like, before anybody serves it: lengths, arrivals, and what there is to hit."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from router.lab.reuse import Reuse
from router.lab.uses import Uses

FRACTIONS = {"1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "1": 1.0}
"""Cache sizes at which the pooled LRU is counted, as shares of the working set."""

_HOTTEST = 10
_WINDOWS = 10


def trace_stats(trace: str, uses: Uses) -> dict[str, Any]:
    """The statistics of `trace`, as JSON has them; docs/traces.md says what each means."""
    capacities = np.array([max(1, round(uses.distinct * share)) for share in FRACTIONS.values()])
    reuse = Reuse.of(uses, capacities)
    total = int(uses.lengths.sum())
    answers = uses.answers[uses.answers >= 0]
    lru = reuse.lru.sum(axis=0) / total
    return {
        "trace": trace,
        "requests": len(uses.lengths),
        "tokens_estimated": uses.estimated,
        "prompt_tokens": _summary(uses.lengths),
        "answer_tokens": _summary(answers) if len(answers) else None,
        "sessions": _sessions(uses),
        "arrivals": _arrivals(uses),
        "ideal_hit": _ideal(uses, reuse, total),
        "pooled_lru_hit": dict(zip(FRACTIONS, lru.tolist(), strict=True)),
        "working_set": _working_set(uses),
        "reuse_distance": _distances(reuse),
        "hottest_prefixes": _hottest(uses),
    }


def _summary(lengths: NDArray[np.int64]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99])
    return {
        "total": int(lengths.sum()),
        "mean": float(lengths.mean()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": int(lengths.max()),
    }


def _sessions(uses: Uses) -> dict[str, Any] | None:
    """How many there are, and how many turns they have; None where requests belong to none."""
    known = uses.sessions[uses.sessions >= 0]
    if not len(known):
        return None
    turns = np.bincount(known)
    return {"count": len(turns), "turns_mean": float(turns.mean()), "turns_max": int(turns.max())}


def _arrivals(uses: Uses) -> dict[str, float | None] | None:
    """Rates over the time from the first to the last arrival; None where a request has no time."""
    times = uses.times - uses.times[0]
    if np.isnan(times).any() or times[-1] <= 0:
        return None
    gaps = np.diff(times)
    return {
        "duration_s": float(times[-1]),
        "requests_per_s": len(times) / float(times[-1]),
        "prompt_tokens_per_s": float(uses.lengths.sum() / times[-1]),
        "gap_cv": float(gaps.std() / gaps.mean()),
        "peak_to_mean_second": _peak_to_mean(times, 1.0),
        "peak_to_mean_minute": _peak_to_mean(times, 60.0),
    }


def _peak_to_mean(times: NDArray[np.float64], window_s: float) -> float | None:
    """Most arrivals in one window over the mean of all; None where the trace is shorter than two."""
    if times[-1] < 2 * window_s:
        return None
    _, counts = np.unique(times // window_s, return_counts=True)
    return float(counts.max() / (len(times) * window_s / times[-1]))


def _ideal(uses: Uses, reuse: Reuse, total: int) -> dict[str, float | None]:
    """Hit tokens over prompt tokens of caches that never forget."""
    everything = int(reuse.ideal.sum()) / total
    if not (uses.sessions >= 0).any():
        return {"all": everything, "within_sessions": None, "across_sessions": None}
    within = int(reuse.within.sum()) / total
    return {"all": everything, "within_sessions": within, "across_sessions": everything - within}


def _distances(reuse: Reuse) -> list[dict[str, int]]:
    """Reuses by distance, in powers of two, up to the largest that occurs."""
    last = int(np.flatnonzero(reuse.distances).max(initial=-1))
    return [{"up_to_blocks": 1 << k, "uses": int(reuse.distances[k])} for k in range(last + 1)]


def _hottest(uses: Uses) -> list[dict[str, Any]]:
    """The prefixes whose reuse saves most tokens; each ends where prompts that share it part."""
    times_used = np.bincount(uses.blocks, minlength=uses.distinct)
    depths = np.zeros(uses.distinct, np.int64)
    next_used = np.zeros(uses.distinct, np.int64)  # most uses of a block that follows
    places = np.arange(len(uses.blocks)) - np.repeat(uses.begins[:-1], np.diff(uses.begins))
    depths[uses.blocks] = places + 1
    inner = np.flatnonzero(places > 0)
    np.maximum.at(next_used, uses.blocks[inner - 1], times_used[uses.blocks[inner]])
    saved = (times_used - 1) * depths
    ends = np.flatnonzero((times_used > next_used) & (saved > 0))
    best = ends[np.argsort(-saved[ends], kind="stable")[:_HOTTEST]]
    requests = len(uses.lengths)
    return [
        {
            "tokens": int(depths[block]) * uses.size,
            "requests": int(times_used[block]),
            "share_of_requests": int(times_used[block]) / requests,
            "reused_tokens": int(saved[block]) * uses.size,
        }
        for block in best
    ]


def _working_set(uses: Uses) -> dict[str, Any]:
    """Distinct blocks in all; and over ten equal windows of the trace, so far and within each.

    Windows are of time, or of requests where times are unknown.
    """
    timed = not np.isnan(uses.times).any() and uses.times[-1] > uses.times[0]
    clock = uses.times - uses.times[0] if timed else np.arange(len(uses.times), dtype=np.float64)
    edges = np.linspace(0, clock[-1], _WINDOWS + 1)[1:]
    ends = uses.begins[np.searchsorted(clock, edges, side="right")]
    fresh = np.zeros(uses.distinct, bool)
    windows, begin = [], 0
    for edge, end in zip(edges, ends, strict=True):
        inside = np.unique(uses.blocks[begin:end])
        fresh[inside] = True
        windows.append(
            {"until": float(edge), "blocks_so_far": int(fresh.sum()), "blocks_within": len(inside)}
        )
        begin = end
    return {
        "block_size": uses.size,
        "blocks": uses.distinct,
        "tokens": uses.distinct * uses.size,
        "unit": "seconds" if timed else "requests",
        "over_time": windows,
    }
