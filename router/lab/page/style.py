"""How charts look: colours that colour-blind readers can tell apart, and SVG that follows the page's theme.

Colours are those of Okabe and Ito (2008). matplotlib cannot name CSS variables, so it draws with stand-ins
that no chart uses otherwise, and `svg` puts the page's colours in their place.
"""

import io
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from router.lab.page.runs import PageRun

INK, GRID, MUTED, FAINT = "#010203", "#040506", "#070809", "#0a0b0c"
_THEME = {INK: "currentColor", GRID: "var(--grid)", MUTED: "var(--muted)", FAINT: "var(--faint)"}

_HIGHLIGHT = "#0072b2"
_OTHERS = ("#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#8c6d1f")
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 1.5, 1.5, 1.5)), "-", (0, (4, 2)))
FATES = {
    "hit": ("#0072b2", "#ffffff", "hit"),
    "staleness": ("#d55e00", "#ffffff", "lost: staleness"),
    "routing": ("#e69f00", "#111111", "lost: routing"),
    "missed": ("#e69f00", "#111111", "missed, though seen before"),
    "capacity": ("#56b4e9", "#111111", "lost: capacity"),
    "workload": (FAINT, INK, "never seen before"),
}
"""Of each fate of prompt tokens: colour, colour of text on it, name."""
REASONS = (*zip((_HIGHLIGHT, *_OTHERS), ("#ffffff", "#ffffff", *["#111111"] * 4, "#ffffff"), strict=True),)
"""Colours of parts, and of text on them."""

_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "warmroute",
    "font.family": "DejaVu Sans",  # comes with matplotlib, and is wider than what the page shows
    "font.size": 9,
    "text.parse_math": False,  # names come from users
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class LineStyle:
    """How the lines and bars of a policy look; `shown` says whether legends name it."""

    color: str
    dashes: Any
    width: float
    shown: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `Axes.plot`; named lines are drawn above the others."""
        return {
            "color": self.color,
            "linestyle": self.dashes,
            "linewidth": self.width,
            "zorder": 3 if self.shown else 2,
        }


def line_styles(runs: Sequence[PageRun]) -> Mapping[str, LineStyle]:
    """A style for each policy: `cache_aware` (else the first) and the six of lowest mean TTFT stand out.

    All others are grey.
    """
    best: dict[str, float] = {}
    for run in runs:
        mean = run.figures["ttft_ms"]["mean"]
        best.setdefault(run.policy, float("inf") if mean is None else mean)
    chosen = "cache_aware" if "cache_aware" in best else next(iter(best), "")
    others = sorted((policy for policy in best if policy != chosen), key=best.__getitem__)
    styles = {policy: LineStyle(MUTED, "-", 0.8, shown=False) for policy in others}
    for policy, color, dashes in zip(others, _OTHERS, _DASHES, strict=False):
        styles[policy] = LineStyle(color, dashes, 1.5)
    return {chosen: LineStyle(_HIGHLIGHT, "-", 2.2), **styles}


def figure(width: float, height: float) -> Figure:
    """An empty figure, inches; everything is to be drawn `in_style`."""
    return Figure(figsize=(width, height))


def in_style() -> Any:
    """A context in which matplotlib draws as the page wants it."""
    return rc_context(_SETTINGS)


def svg(drawn: Figure, title: str) -> str:
    """The figure as an `<svg>` element for a page, named `title` for screen readers. Deterministic."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    drawn.savefig(buffer, format="svg", metadata=nothing)
    text = _compact(buffer.getvalue())
    for stand_in, color in _THEME.items():
        text = text.replace(stand_in, color)
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def _compact(text: str) -> str:
    """What of a drawing a page needs, with ids that no other drawing has; the page says how wide it is."""
    text = text[text.index("<svg") :]
    for useless in (
        r"<metadata>.*?</metadata>",
        r"<style.*?</style>",
        r'(?<=<svg) width="[^"]*" height="[^"]*"',
        r' id="(?![a-z][0-9a-f]{10}")[^"]*"',  # nobody refers to groups and images
        r" transform=\"rotate\(-0 [^)]*\)\"",
        r"font-family: 'DejaVu Sans'; ",
        r'<path d="[^"]*" style="fill: none"/>',  # frames that are not drawn
        r"(?<=>)\s+(?=<)",
    ):
        text = re.sub(useless, "", text, flags=re.DOTALL)
    mark = f"{zlib.crc32(text.encode()):08x}"
    return re.sub(r'((?:id="|#)[a-z][0-9a-f]{10})(?=["\)])', rf"\1-{mark}", text)


def grouped(runs: Iterable[PageRun]) -> dict[float | None, list[PageRun]]:
    """The runs by speed, in their order."""
    groups: dict[float | None, list[PageRun]] = {}
    for run in runs:
        groups.setdefault(run.speed, []).append(run)
    return groups
