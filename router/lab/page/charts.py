"""The charts that compare runs: bars of hit rates and fates, and lines over time or over latencies."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from router.lab.page.runs import Floats, PageRun
from router.lab.page.style import (
    FATES,
    INK,
    MUTED,
    REASONS,
    LineStyle,
    figure,
    grouped,
    in_style,
    line_styles,
    svg,
)
from router.lab.page.timeline import last_s, timeline

_WIDTH = 10.5
_BAR = 0.27  # inches of a bar with its gap
_POINTS = 160  # of a curve
_LEAST_NAMED = 0.032  # of the width: narrower parts of a bar have no room for their figure
_BOUNDS: tuple[Any, ...] = ((0, (1, 1.5)), (0, (5, 2)), "-")
Drawing = Callable[[Axes, PageRun, LineStyle], None]


def hit_rates(runs: Sequence[PageRun], bounds: Mapping[str, float]) -> str:
    """A bar a run, and a line a bound."""
    with in_style():
        drawn, axes = _bars([f"{run.label}\u2002\u2002{_percent(run.figures['hit_rate'])}" for run in runs])
        styles = line_styles(runs)
        rates = [*bounds.values(), *(run.figures["hit_rate"] or 0.0 for run in runs)]
        most = min(100.0, 106 * max(rates) or 1.0)
        for row, run in enumerate(runs):
            rate = 100 * (run.figures["hit_rate"] or 0.0)
            axes.barh(row, rate, color=styles[run.policy].color, height=0.72)
        handles = []
        for (name, rate), dashes in zip(bounds.items(), _BOUNDS, strict=False):
            axes.axvline(100 * rate, color=INK, linestyle=dashes, linewidth=1.2)
            label = f"{name}: {rate:.1%}"
            handles.append(Line2D([], [], color=INK, linestyle=dashes, linewidth=1.2, label=label))
        axes.set_xlim(0, most)
        _finish_bars(drawn, axes, handles, "hit rate, % of prompt tokens")
        return svg(drawn, "Hit rate of each run against the bounds")


def fates(runs: Sequence[PageRun]) -> str:
    """A stacked bar a run: what became of its prompt tokens, in percent."""
    names = list(dict.fromkeys(name for run in runs for name in run.fates))
    parts = [{name: run.fates.get(name, 0) for name in names} for run in runs]
    looks = {name: (FATES[name][0], FATES[name][1]) for name in names}
    labels = {name: FATES[name][2] for name in names}
    shares = [100 - 100 * run.fates["workload"] / max(1, sum(run.fates.values())) for run in runs]
    most = min(100.0, 1.2 * max(shares) or 100.0)  # what nobody could hit would take most of the room
    return _stacked(runs, parts, looks, labels, "% of prompt tokens", "What became of prompt tokens", most)


def reasons(runs: Sequence[PageRun]) -> str:
    """A stacked bar a run: its decisions by reason, in percent."""
    names = sorted({name for run in runs for name in run.reasons})
    parts = [{name: run.reasons.get(name, 0) for name in names} for run in runs]
    looks = {name: REASONS[number % len(REASONS)] for number, name in enumerate(names)}
    labels = {name: name for name in names}
    return _stacked(runs, parts, looks, labels, "% of decisions", "Decisions by reason")


def latencies(runs: Sequence[PageRun], seconds: Callable[[PageRun], Floats], what: str) -> str:
    """Cumulative distributions of a latency, a panel for each speed; x is logarithmic."""
    found = np.concatenate([seconds(run) for run in runs] or [np.ones(1)])
    found = found[found > 0]
    low, high = (float(found.min()), float(found.max())) if len(found) else (0.1, 1.0)
    if len(found) > 1000:
        low = float(np.quantile(found, 0.005))  # a few very fast ones would take half of the width

    def draw(axes: Axes, run: PageRun, style: LineStyle) -> None:
        values = np.sort(seconds(run))
        if len(values):
            shares = np.linspace(0, 1, min(_POINTS, len(values)))
            axes.plot(np.quantile(values, shares), shares, **style.options)

    def finish(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.set_xlim(low * 0.9, high * 1.1)
        _time_ticks(axes)
        axes.set_ylim(0, 1.01)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))

    return _lines(runs, draw, finish, what, "share of requests", f"Distributions of {what}")


def hits_over_time(runs: Sequence[PageRun]) -> str:
    """Hit rate over the time of a run, a panel for each speed."""

    def draw(axes: Axes, run: PageRun, style: LineStyle) -> None:
        line = timeline(run, last_s(run.requests.arrived_s), bins=30)
        middle = (line.edges_s[1:] + line.edges_s[:-1]) / 2
        axes.plot(middle, line.all_hit_rate, **style.options)

    def finish(axes: Axes) -> None:
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g} s"))

    return _lines(runs, draw, finish, "time of arrival", "hit rate", "Hit rate over time")


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.1f}"


def _bars(labels: Sequence[str]) -> tuple[Figure, Axes]:
    """Room for a bar each, the first one on top, and for a legend above."""
    height = _BAR * len(labels) + 0.95
    drawn = figure(_WIDTH, height)
    left = min(0.3, (0.075 * max(map(len, labels)) + 0.2) / _WIDTH)
    axes = drawn.add_axes((left, 0.52 / height, 0.97 - left, _BAR * len(labels) / height))
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    return drawn, axes


def _finish_bars(drawn: Figure, axes: Axes, handles: Sequence[Any] | None, label: str) -> None:
    axes.set_xlabel(label)
    left = axes.get_position().x0
    options: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (left - 0.01, 1.0), "ncols": 7}
    found = handles if handles is not None else axes.get_legend_handles_labels()[0]
    drawn.legend(handles=found, columnspacing=1.6, handlelength=1.8, **options)


def _stacked(
    runs: Sequence[PageRun],
    parts: Sequence[Mapping[str, int]],
    looks: Mapping[str, tuple[str, str]],
    labels: Mapping[str, str],
    unit: str,
    title: str,
    most: float = 100.0,
) -> str:
    """Bars of parts that add up to 100 %, cut off at `most` percent."""
    with in_style():
        drawn, axes = _bars([run.label for run in runs])
        left = np.zeros(len(runs))
        totals = np.array([max(1, sum(counts.values())) for counts in parts])
        for name, label in labels.items():
            widths = 100 * np.array([counts[name] for counts in parts]) / totals
            color, ink = looks[name]
            axes.barh(range(len(runs)), widths, left=left, color=color, height=0.76, label=label)
            for row, (width, start) in enumerate(zip(widths, left, strict=True)):
                visible = min(width, most - start)
                if visible >= _LEAST_NAMED * most:
                    text = f"{width:.1f} →" if visible < width - 1e-9 else f"{width:.1f}"
                    axes.text(start + visible / 2, row, text, color=ink, ha="center", va="center", fontsize=8)
            left += widths
        axes.set_xlim(0, most)
        _finish_bars(drawn, axes, None, unit)
        return svg(drawn, title)


def _lines(
    runs: Sequence[PageRun], draw: Drawing, finish: Callable[[Axes], None], x: str, y: str, title: str
) -> str:
    """A panel for each speed, two in a row, and one legend for all."""
    with in_style():
        groups, styles = grouped(runs), line_styles(runs)
        columns = min(2, len(groups))
        rows = -(-len(groups) // columns)
        drawn = figure(_WIDTH, 2.75 * rows + 0.5)
        panels = drawn.subplots(rows, columns, squeeze=False, sharey=True)
        for axes in panels.flat:
            axes.set_visible(False)
        for axes, (speed, group) in zip(panels.flat, groups.items(), strict=False):
            axes.set_visible(True)
            for run in group:
                draw(axes, run, styles[run.policy])
            axes.grid()
            finish(axes)
            axes.set_xlabel(x)
            if speed is not None:
                axes.set_title(f"arrivals ×{speed:g}")
        for row in panels:
            row[0].set_ylabel(y)
        _legend(drawn, styles)
        low = 0.52 / drawn.get_figheight()
        high = 1 - 0.62 / drawn.get_figheight()
        drawn.subplots_adjust(left=0.075, right=0.985, bottom=low, top=high, wspace=0.08, hspace=0.45)
        return svg(drawn, title)


def _legend(drawn: Figure, styles: Mapping[str, LineStyle]) -> None:
    handles = [Line2D([], [], label=name, **style.options) for name, style in styles.items() if style.shown]
    hidden = sum(not style.shown for style in styles.values())
    if hidden:
        handles.append(Line2D([], [], color=MUTED, linewidth=0.8, label=f"{hidden} others"))
    options: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.065, 1.0), "ncols": 8}
    drawn.legend(handles=handles, columnspacing=1.5, handlelength=2.6, **options)


def _time_ticks(axes: Axes) -> None:
    def name(value: float, _: int | None = None) -> str:
        return f"{value:g} s" if value >= 1 else f"{1000 * value:g} ms"

    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(name))
    axes.xaxis.set_minor_formatter(NullFormatter())
