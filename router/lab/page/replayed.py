"""The page about a replay against a live endpoint."""

from pathlib import Path
from urllib.parse import urlsplit

from router.lab.page.runs import live
from router.lab.replay import ReplayOptions
from router.lab.report import Report


def write_replay(path: str, trace: str, url: str, options: ReplayOptions, report: Report) -> None:
    """Write the page of a replay. Raises OptionError: the file cannot be written."""
    from router.lab.page.page import Page, write_page  # matplotlib is slow to import, and seldom needed

    bounds = {}
    if report.ideal_hit_rate is not None:
        bounds["a cache that never forgets"] = report.ideal_hit_rate
    title = f"Replay: {Path(trace).name}"
    write_page(Page(title, _facts(trace, url, options, report), [live(report)], bounds, live=True), path)


def _facts(trace: str, url: str, options: ReplayOptions, report: Report) -> list[tuple[str, str]]:
    loop = (
        f"open, ×{options.speed:g}" if options.speed is not None else f"closed, {options.in_flight} in flight"
    )
    facts = [
        ("trace", Path(trace).name),
        ("endpoint", urlsplit(url).netloc.rpartition("@")[2] or url),  # never a password
        ("loop", loop),
        ("requests", f"{report.requests:,}"),
        ("prompt tokens", f"{report.prompt_tokens:,}"),
        ("duration", f"{report.duration_s:,.1f} s"),
    ]
    if report.errors:
        facts.append(("errors", ", ".join(f"{count:,} × {kind}" for kind, count in report.errors.items())))
    if report.interrupted:
        facts.append(("interrupted", "yes: of what was sent until then"))
    return facts
