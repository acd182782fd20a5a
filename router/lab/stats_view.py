"""The statistics of a trace in the terminal."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

_PREFIXES = 5


def stats_tables(found: dict[str, Any]) -> Group:
    """What `trace_stats` found: lengths and arrivals, caches, distances, prefixes. Fits 80 columns."""
    return Group(_lengths(found), _facts(found), _sizes(found), _distances(found), _prefixes(found))


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _lengths(found: dict[str, Any]) -> Table:
    estimated = " (estimated)" if found["tokens_estimated"] else ""
    names = ("mean", "p50", "p90", "p99", "max", "total")
    table = _table(f"tokens{estimated}", *names)
    for label, lengths in (("prompts", found["prompt_tokens"]), ("answers", found["answer_tokens"])):
        if lengths is not None:
            table.add_row(label, *(f"{lengths[name]:,.0f}" for name in names))
    return table


def _facts(found: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    sessions, arrivals, ideal = found["sessions"], found["arrivals"], found["ideal_hit"]
    count = f"{found['requests']:,}"
    if sessions is not None:
        count += f" in {sessions['count']:,} sessions of {sessions['turns_mean']:.1f} turns on average"
    table.add_row("requests", count)
    if arrivals is None:
        table.add_row("arrivals", "no clock")
    else:
        rates = (
            f"{arrivals['requests_per_s']:,.3g} requests/s, {arrivals['prompt_tokens_per_s']:,.0f} tokens/s"
        )
        table.add_row("arrivals", f"{rates} for {arrivals['duration_s']:,.0f} s")
        peaks = [_times(arrivals[f"peak_to_mean_{window}"]) for window in ("second", "minute")]
        spread = f"variation of gaps {arrivals['gap_cv']:.2f}, peak over mean "
        table.add_row("burstiness", spread + f"{peaks[0]} by second, {peaks[1]} by minute")
    hit = f"{ideal['all']:.1%}"
    if ideal["within_sessions"] is not None:
        hit += f": {ideal['within_sessions']:.1%} within sessions, {ideal['across_sessions']:.1%} only across"
    table.add_row("ideal hit", hit)
    return table


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _sizes(found: dict[str, Any]) -> Table:
    working_set = found["working_set"]
    table = _table("one LRU cache for all", "blocks", "tokens", "hit rate")
    for name, rate in found["pooled_lru_hit"].items():
        share = working_set["blocks"] * (1 / int(name.partition("/")[2] or 1))
        label = "working set" if name == "1" else f"{name} of it"
        table.add_row(label, f"{share:,.0f}", f"{share * working_set['block_size']:,.0f}", f"{rate:.1%}")
    return table


def _distances(found: dict[str, Any]) -> Table:
    """Without the rare ones; all are in the JSON."""
    buckets = found["reuse_distance"]
    total = sum(bucket["uses"] for bucket in buckets)
    table = _table("blocks between uses, up to", "share of reuses", "so far")
    so_far = 0
    for bucket in buckets:
        so_far += bucket["uses"]
        if bucket["uses"] * 50 >= total:
            shares = (f"{bucket['uses'] / total:.1%}", f"{so_far / total:.1%}")
            table.add_row(f"{bucket['up_to_blocks']:,}", *shares)
    return table


def _prefixes(found: dict[str, Any]) -> Table:
    table = _table("hottest prefixes, tokens", "requests", "share", "tokens reused")
    for prefix in found["hottest_prefixes"][:_PREFIXES]:
        share = f"{prefix['share_of_requests']:.1%}"
        table.add_row(
            f"{prefix['tokens']:,}", f"{prefix['requests']:,}", share, f"{prefix['reused_tokens']:,}"
        )
    return table
