"""The page about simulated runs of a trace."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from router.lab.page.runs import simulated
from router.lab.sim.fleet import FleetConfig
from router.lab.sim.measures import Measures

_BOUNDS = {
    "pooled_lru": "one pool, LRU",
    "pooled_opt": "one pool, optimal eviction",
    "infinite": "a cache that never forgets",
}


def write_simulation(
    path: str,
    trace: str,
    timing: str,
    config: FleetConfig,
    bounds: Mapping[str, float],
    measured: Sequence[tuple[float, Measures]],
) -> None:
    """Write the page of runs that were simulated with a journal, each with its speed.

    `timing` names the step times, `bounds` has the hit rates that the simulation's JSON has. Raises
    OptionError: the file cannot be written.
    """
    from router.lab.page.page import Page, write_page  # matplotlib is slow to import, and seldom needed

    runs = [simulated(measures, speed) for speed, measures in measured]
    first = measured[0][1]
    facts = [("trace", Path(trace).name), ("requests", f"{len(first.ttft_s) + first.refused:,}")]
    facts.append(("prompt tokens", f"{sum(runs[0].fates.values()):,}"))
    named = {name: bounds[key] for key, name in _BOUNDS.items()}
    title = f"Simulated fleet: {Path(trace).name}"
    write_page(Page(title, [*facts, *_facts(timing, config)], runs, named), path)


def _facts(timing: str, config: FleetConfig) -> list[tuple[str, str]]:
    tokens = config.replicas * config.blocks * config.block_size
    facts = [
        ("replicas", f"{config.replicas:,}"),
        ("KV blocks of each", f"{config.blocks:,} of {config.block_size:,} tokens"),
        ("tokens in all caches", f"{tokens:,}"),
        ("step times", timing),
        ("routers", f"{config.routers:,}"),
        ("event delay", f"{1000 * config.event_delay_s:g} ms"),
        ("eviction", config.eviction),
        ("seed", str(config.seed)),
    ]
    if set(config.speeds) != {1.0}:
        facts.append(("speeds of replicas, in turns", ", ".join(f"{speed:g}" for speed in config.speeds)))
    if not config.express:
        facts.append(("engines", "first come, first served"))
    for tier in config.tiers:
        facts.append(("lower tier", f"{tier.blocks:,} blocks, {tier.bytes_per_s / 1e9:g} GB/s"))
    for change in config.changes:
        which = "" if change.replica < 0 else f" {change.replica}"
        facts.append((f"at {change.at_s:g} s", f"{change.kind}{which}"))
    return facts
