"""A page about runs: one self-contained HTML file, without scripts, that loads nothing.

Importing this module imports matplotlib, which takes a second: do so only when a page is wanted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from router.lab.errors import OptionError
from router.lab.page import charts
from router.lab.page.heatmaps import heatmaps
from router.lab.page.runs import PageRun
from router.lab.page.style import FATES, grouped

_TEMPLATE = "template.html"
_OPEN_MAPS = 6  # of so many runs the maps are shown, the others' on a click


@dataclass(frozen=True)
class Page:
    """What a page is of: `facts` are (name, value) pairs about trace and fleet, `bounds` hit rates by name.

    All runs are of the same trace and kind: all simulated, or all `live`.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    runs: Sequence[PageRun]
    bounds: Mapping[str, float] = field(default_factory=dict)
    live: bool = False


@dataclass(frozen=True)
class _Column:
    """A column of the table of runs: a figure of each run, how it is written, and what is best."""

    group: str
    name: str
    value: Callable[[PageRun], float | None]
    text: Callable[[float], str]
    best: Callable[[Sequence[float]], float] | None = min


@dataclass(frozen=True)
class _Cell:
    text: str
    best: bool = False


def write_page(page: Page, path: str) -> None:
    """Write the page. Raises OptionError: the file cannot be written."""
    text = html(page)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror}") from error


def html(page: Page) -> str:
    """The page as text. All names in it are escaped, wherever they came from."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    columns = [column for column in _columns() if any(column.value(run) is not None for run in page.runs)]
    return environment.get_template(_TEMPLATE).render(
        page=page,
        groups=[(name, len(list(group))) for name, group in groupby(columns, lambda column: column.group)],
        columns=columns,
        rows=_rows(page.runs, columns),
        charts={name: Markup(svg) for name, svg in _charts(page).items()},
        maps=[(label, Markup(svg)) for label, svg in heatmaps(page.runs)],
        open_maps=_OPEN_MAPS,
        fates=_fates(page.runs),
        reasons=[run for run in page.runs if run.reasons],
    )


def _charts(page: Page) -> dict[str, str]:
    """The charts that there is something for, by name."""
    runs = page.runs
    found = {"ttft": charts.latencies(runs, lambda run: run.requests.ttft_s, "time to the first token")}
    found["e2e"] = charts.latencies(runs, lambda run: run.requests.e2e_s, "time to the last token")
    if any(run.figures["hit_rate"] is not None for run in runs):
        found["hits"] = charts.hit_rates(runs, page.bounds)
        found["hits_over_time"] = charts.hits_over_time(runs)
    told = [run for run in runs if run.fates]
    if told:
        found["fates"] = charts.fates(told)
    reasoned = [run for run in runs if run.reasons]
    if reasoned:
        found["reasons"] = charts.reasons(reasoned)
    return found


def _columns() -> list[_Column]:
    def of(key: str, part: str) -> Callable[[PageRun], float | None]:
        return lambda run: run.figures[key][part]

    latencies = [
        _Column(group, part, of(key, part), write)
        for group, key, write in (
            ("TTFT, ms", "ttft_ms", _figure),
            ("TPOT, ms", "tpot_ms", _figure),
            ("E2E, s", "e2e_ms", _seconds),
        )
        for part in ("mean", "p50", "p90", "p99")
    ]
    return [
        _Column(
            "hit rate", "%", lambda run: run.figures["hit_rate"], lambda value: f"{100 * value:.1f}", max
        ),
        *latencies,
        _Column("imbalance", "max/mean", lambda run: run.figures.get("imbalance"), lambda v: f"{v:.2f}"),
        _Column("decide", "µs", lambda run: run.figures.get("decide_us"), lambda value: f"{value:.0f}"),
        _Column(
            "not served", "requests", lambda run: run.figures["refused"] or None, lambda v: f"{v:,.0f}", None
        ),
    ]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1000:,.{1 if milliseconds >= 1000 else 3}f}"


def _rows(runs: Sequence[PageRun], columns: Sequence[_Column]) -> list[dict[str, Any]]:
    """A row a run; the best of each column is marked among the runs of one speed, if there are several."""
    rows = []
    for group in grouped(runs).values():
        for number, run in enumerate(group):
            cells = [_cell(column, run, group) for column in columns]
            counts = run.figures["requests_per_replica"]
            rows.append(
                {
                    "run": run,
                    "first": number == 0,
                    "cells": cells,
                    "counts": counts,
                    "counts_text": _spread(counts),
                }
            )
    return rows


def _cell(column: _Column, run: PageRun, group: Sequence[PageRun]) -> _Cell:
    value = column.value(run)
    if value is None:
        return _Cell("–")
    others = [found for found in map(column.value, group) if found is not None]
    text = column.text(value)
    if column.best is None or len(set(map(column.text, others))) == 1:
        return _Cell(text)  # none is better than the others
    return _Cell(text, text == column.text(column.best(others)))


def _spread(counts: Sequence[int]) -> str:
    """All counts if they are few, else the least and the most."""
    if len(counts) <= 4:
        return " / ".join(f"{count:,}" for count in counts)
    return f"{min(counts):,} to {max(counts):,}"


def _fates(runs: Sequence[PageRun]) -> dict[str, Any]:
    """The table below the chart: points and tokens of each fate."""
    told = [run for run in runs if run.fates]
    names = list(dict.fromkeys(name for run in told for name in run.fates))
    rows = []
    for run in told:
        total = max(1, sum(run.fates.values()))
        cells = [
            (f"{100 * run.fates.get(name, 0) / total:.2f}", f"{run.fates.get(name, 0):,}") for name in names
        ]
        rows.append((run.label, cells, f"{sum(run.fates.values()):,}"))
    return {"names": [FATES[name][2] for name in names], "rows": rows}
