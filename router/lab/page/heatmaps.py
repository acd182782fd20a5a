"""Load and hit rate of each replica over time, as heat maps: a row a replica, a column a part of a run."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from router.lab.page.runs import Floats, PageRun
from router.lab.page.style import figure, grouped, in_style, svg
from router.lab.page.timeline import Timeline, last_s, timeline

_WIDTH, _COLORS = 10.5, "cividis"


def heatmaps(runs: Sequence[PageRun]) -> list[tuple[str, str]]:
    """For each run with known replicas its label and three maps; runs of one speed share all scales."""
    found = []
    for group in grouped(run for run in runs if run.replicas).values():
        end_s = last_s(*(run.requests.ended_s for run in group))
        lines = [timeline(run, end_s) for run in group]
        most = max(1.0, *(float(line.there.max()) for line in lines))
        best = max(0.01, *(float(np.nan_to_num(line.hit_rate).max()) for line in lines))
        found += [(run.label, _maps(run, line, most, best)) for run, line in zip(group, lines, strict=True)]
    return found


def _maps(run: PageRun, line: Timeline, most: float, best: float) -> str:
    with in_style():
        height = 0.9 + min(2.6, max(0.7, 0.11 * len(run.replicas)))
        drawn = figure(_WIDTH, height)
        panels = drawn.subplots(1, 3, sharey=True)
        drawn.subplots_adjust(0.06, 0.5 / height, 0.965, 1 - 0.28 / height, wspace=0.14)
        _map(drawn, panels[0], line, line.there, PowerNorm(0.5, 0, most), "requests there")
        _map(drawn, panels[1], line, line.busy, Normalize(0, 1), "share of time busy")
        _map(drawn, panels[2], line, line.hit_rate, Normalize(0, best), "hit rate")
        panels[0].set_ylabel("replica")
        panels[0].yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        return svg(drawn, "Load and hit rate of each replica over time")


def _map(drawn: Figure, axes: Axes, line: Timeline, values: Floats, scale: Normalize, title: str) -> None:
    end = float(line.edges_s[-1])
    extent = (0.0, end, len(values) - 0.5, -0.5)
    image = axes.imshow(values, aspect="auto", interpolation="none", extent=extent, norm=scale, cmap=_COLORS)
    axes.set_title(title)
    axes.set_xlabel("time of the run")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g} s"))
    bar = drawn.colorbar(image, ax=axes, pad=0.02, fraction=0.05, aspect=12)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_locator(MaxNLocator(3))
    if not isinstance(scale, PowerNorm):
        bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
