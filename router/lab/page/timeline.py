"""Requests over time, by replica: matrices [replicas, bins] over equal parts of a run."""

from dataclasses import dataclass

import numpy as np

from router.lab.page.runs import Floats, PageRun

BINS = 60


@dataclass(frozen=True, eq=False)
class Timeline:
    """Means over each bin: requests at each replica, the share of time with any, and hit over prompt tokens.

    `hit_rate` is NaN where no prompt came, by the time of arrival. `all_hit_rate` [bins] is of all together.
    """

    edges_s: Floats
    there: Floats
    busy: Floats
    hit_rate: Floats
    all_hit_rate: Floats


def timeline(run: PageRun, end_s: float, bins: int = BINS) -> Timeline:
    """The timeline of a run until `end_s`. Requests of unknown replicas count in `all_hit_rate` only."""
    requests, count = run.requests, len(run.replicas)
    edges = np.linspace(0.0, end_s, bins + 1)
    there, busy = np.zeros((count, bins)), np.zeros((count, bins))
    hit, prompt = np.zeros((count + 1, bins)), np.zeros((count + 1, bins))
    came = np.clip(np.searchsorted(edges, requests.arrived_s, "right") - 1, 0, bins - 1)
    np.add.at(hit, (requests.replica, came), requests.cached_tokens)  # row -1 is of unknown replicas
    np.add.at(prompt, (requests.replica, came), requests.prompt_tokens)
    for number in range(count):
        mine = requests.replica == number
        began, ended = requests.arrived_s[mine], requests.ended_s[mine]
        there[number] = _mean(edges, began, ended)
        busy[number] = _mean(edges, *_union(began, ended))
    with np.errstate(invalid="ignore"):
        return Timeline(edges, there, busy, hit[:count] / prompt[:count], hit.sum(0) / prompt.sum(0))


def last_s(*times: Floats) -> float:
    """The latest of some times, 1 if all are 0 or there is none: a timeline has to have a length."""
    return max((float(found.max()) for found in times if len(found)), default=0.0) or 1.0


def _mean(edges: Floats, began: Floats, ended: Floats) -> Floats:
    """How many of the intervals are open, on average over each bin, [bins]."""
    began, ended = np.sort(began), np.sort(ended)
    return np.diff(_before(began, edges) - _before(ended, edges)) / np.diff(edges)


def _before(times: Floats, edges: Floats) -> Floats:
    """For each edge, the sum of the times that have passed since every moment before it."""
    count = np.searchsorted(times, edges)
    total = np.concatenate(([0.0], np.cumsum(times)))
    return count * edges - total[count]


def _union(began: Floats, ended: Floats) -> tuple[Floats, Floats]:
    """The intervals in which at least one is open: their beginnings and ends."""
    if not len(began):
        return began, ended
    order = np.argsort(began, kind="stable")
    began, latest = began[order], np.maximum.accumulate(ended[order])
    fresh = np.concatenate(([True], began[1:] > latest[:-1]))
    return began[fresh], latest[np.concatenate((fresh[1:], [True]))]
