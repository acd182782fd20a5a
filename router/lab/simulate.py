"""`warmroute simulate`: hit rates and latencies of a trace on a fleet that one need not own."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvcore.errors import InvalidRequest
from router.lab.commands import check_report, check_writable, deliver, read_requests, tell_skipped
from router.lab.errors import OptionError
from router.lab.modifiers import in_time_order
from router.lab.page.simulation import write_simulation
from router.lab.pooled import PooledOptions, Prompts, infinite, optimum, simulate_policy
from router.lab.record import Request
from router.lab.rows import TraceOptions
from router.lab.sim.fleet import Fleet, FleetConfig
from router.lab.sim.journal import Journal
from router.lab.sim.measures import Measures
from router.lab.sim.policies import OTHERS, PLACED
from router.lab.sim.timing import Timing


def simulate(
    trace: Annotated[str, typer.Argument(help="A trace file with hash ids or token ids, plain or gzip.")],
    replicas: Annotated[int, typer.Option(help="Replicas of the fleet.")] = 8,
    blocks: Annotated[
        int, typer.Option(help="KV blocks of each replica (of the pool with --pooled).")
    ] = 2000,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 512,
    policy: Annotated[
        str | None,
        typer.Option(help=f"Policies to compare, separated by commas: {', '.join((*PLACED, *OTHERS))}."),
    ] = None,
    speed: Annotated[str, typer.Option(help="Arrivals, this many times as fast; several with commas.")] = "1",
    timing: Annotated[str, typer.Option(help="Step times: GPU-model[-tpN], such as h100-8b.")] = "h100-8b",
    routers: Annotated[int, typer.Option(help="Routers in front of the fleet.")] = 1,
    event_delay: Annotated[float, typer.Option(help="Seconds until routers hear of a replica.")] = 0.01,
    eviction: Annotated[str, typer.Option(help="Eviction policy of the replicas' caches.")] = "reuse",
    slow: Annotated[float, typer.Option(help="Share of the replicas that are half as fast.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of all chance.")] = 0,
    pooled: Annotated[
        bool, typer.Option("--pooled", help="One cache for all, no fleet: --policy names eviction policies.")
    ] = False,
    round_up: Annotated[
        bool, typer.Option("--round-up", help="With --pooled: the last part of a prompt is a block too.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave broken lines out.")] = False,
    json_file: Annotated[str | None, typer.Option("--json", help="Write JSON here (- for stdout).")] = None,
    report_file: Annotated[
        str | None, typer.Option("--report", help="Write a page about the runs here (HTML, one file).")
    ] = None,
) -> None:
    """Run a trace on a simulated fleet, once per routing policy: real placement and real prefix caches, and a
    model of how long steps take. With --pooled: eviction policies in one pool of blocks."""
    check_writable(json_file)
    check_report(report_file)
    if report_file is not None and pooled:
        raise OptionError("--report is about fleets: it cannot be had with --pooled")
    speeds = _numbers(speed)
    requests, skipped = read_requests(trace, TraceOptions(), limit, skip_bad)
    requests = in_time_order(requests)
    console = Console(stderr=json_file == "-")
    try:
        if pooled:
            names = (policy or "lru,reuse").split(",")
            report = _pooled(requests, PooledOptions(blocks, block_size, speeds[0], round_up), names)
            console.print(_pooled_table(report))
        else:
            config = FleetConfig(
                replicas,
                blocks,
                block_size,
                Timing.preset(timing),
                routers,
                event_delay,
                eviction,
                seed,
                slow,
            )
            names = (policy or "cache_aware,least_load,round_robin").split(",")
            report, watched = _fleet(requests, config, names, speeds, watch=report_file is not None)
            console.print(_fleet_table(report))
    except (InvalidRequest, MemoryError) as error:
        raise OptionError(str(error)) from error
    deliver({"trace": trace, **report}, json_file)
    if report_file is not None:
        write_simulation(report_file, trace, timing, config, report["bounds"], watched)
    tell_skipped(skipped)


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"--speed takes numbers separated by commas, not {text!r}") from None
    if not all(0 < number < float("inf") for number in numbers):
        raise OptionError("speeds must be positive")
    return numbers


def _pooled(requests: Sequence[Request], options: PooledOptions, names: Sequence[str]) -> dict[str, Any]:
    prompts = Prompts.of(requests, options)
    runs = {name: simulate_policy(prompts, options, name) for name in names}
    bounds = {"infinite": infinite(prompts, options), "pooled_opt": optimum(prompts, options)}
    return {"blocks": options.blocks, "block_size": options.block_size, "bounds": bounds, "pooled": runs}


def _fleet(
    requests: Sequence[Request],
    config: FleetConfig,
    names: Sequence[str],
    speeds: Sequence[float],
    watch: bool,
) -> tuple[dict[str, Any], list[tuple[float, Measures]]]:
    """The report, and the speed and measures of each run; those have a journal if `watch`."""
    fleets = [(Fleet(config, name), speed) for speed in speeds for name in names]  # all names are checked now
    pool = PooledOptions(config.replicas * config.blocks, config.block_size)
    prompts = Prompts.of(requests, pool)
    bounds = {
        "infinite": infinite(prompts, pool),
        "pooled_lru": simulate_policy(prompts, pool, "lru")["hit_rate"],
        "pooled_opt": optimum(prompts, pool),
    }
    if watch:
        for fleet, _ in fleets:
            fleet.measures.journal = Journal(config.block_size)
    measured = [(speed, fleet.run(requests, speed)) for fleet, speed in fleets]
    runs = [{**measures.as_json(), "speed": speed} for speed, measures in measured]
    return {"bounds": bounds, "runs": runs}, measured


def _pooled_table(report: dict[str, Any]) -> Table:
    table = Table("policy", title=f"One pool of {report['blocks']:,} blocks of {report['block_size']} tokens")
    table.add_column("hit rate", justify="right")
    for name, run in report["pooled"].items():
        table.add_row(name, f"{run['hit_rate']:.2%}")
    table.add_section()
    table.add_row("offline optimum", f"{report['bounds']['pooled_opt']:.2%}")
    table.add_row("never forgets", f"{report['bounds']['infinite']:.2%}")
    return table


def _fleet_table(report: dict[str, Any]) -> Table:
    """A row per run; fits 80 columns."""
    bounds = report["bounds"]
    caption = f"one pool, LRU {bounds['pooled_lru']:.1%}; optimum {bounds['pooled_opt']:.1%}"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.caption = f"{caption}; never forgetting {bounds['infinite']:.1%}"
    table.add_column("policy", no_wrap=True)
    for name in ("speed", "hit", "TTFT ms", "p50", "p99", "TPOT", "E2E s", "imbal.", "decide"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in report["runs"]:
        ttft = run["ttft_ms"]
        cells = [_cell(value) for value in (ttft["mean"], ttft["p50"], ttft["p99"], run["tpot_ms"]["mean"])]
        cells.append(_cell(run["e2e_ms"]["mean"], 1000, 1))
        last = (f"{run['imbalance']:.2f}", f"{run['decide_us']:.0f} µs")
        table.add_row(run["policy"], f"{run['speed']:g}", f"{run['hit_rate']:.1%}", *cells, *last)
    return table


def _cell(value: float | None, unit: float = 1, digits: int = 0) -> str:
    return "-" if value is None else f"{value / unit:,.{digits}f}"
