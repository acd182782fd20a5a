"""`warmroute simulate`: hit rates and latencies of a trace on a fleet that one need not own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from kvcore.errors import InvalidRequest
from router.lab.commands import check_report, check_writable, deliver, read_requests, tell_skipped
from router.lab.errors import OptionError, TraceError
from router.lab.ideal import resident_hits
from router.lab.modifiers import MAX_SPEED, faster, in_time_order, with_arrivals, with_starts
from router.lab.page.simulation import write_simulation
from router.lab.pooled import (
    PooledOptions,
    Prompts,
    infinite,
    optimum,
    prompt_length,
    simulate_policy,
)
from router.lab.record import Request
from router.lab.rows import TraceOptions
from router.lab.sim.changes import Change
from router.lab.sim.fleet import Fleet, FleetConfig
from router.lab.sim.journal import Journal
from router.lab.sim.measures import Measures, spread
from router.lab.sim.policies import OTHERS, PLACED, check_policies
from router.lab.sim.tiers import TierConfig
from router.lab.sim.timing import Timing
from router.lab.traces import read_trace

_ANY_WIDTH = 1000
_WARM_UP = 8  # requests


def simulate(
    trace: Annotated[str, typer.Argument(help="A trace file (plain or gzip), `builtin`, or `builtin:tiny`.")],
    replicas: Annotated[int, typer.Option(help="Replicas of the fleet.")] = 8,
    blocks: Annotated[
        int, typer.Option(help="KV blocks of each replica (of the pool with --pooled).")
    ] = 2000,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 512,
    policy: Annotated[
        str | None,
        typer.Option(help=f"Policies to compare, separated by commas: {', '.join((*PLACED, *OTHERS))}."),
    ] = None,
    speed: Annotated[
        str, typer.Option(help="Arrivals and think times, this many times as fast; several with commas.")
    ] = "1",
    timing: Annotated[
        str, typer.Option(help="Step times: GPU-model[-tpN], such as h100-8b, or JSON of `bench engine`.")
    ] = "h100-8b",
    replica_speed: Annotated[
        str, typer.Option(help="Speeds of the replicas, repeated as needed: 1,0.5 halves every other one's.")
    ] = "1",
    fcfs: Annotated[
        bool, typer.Option("--fcfs", help="Engines without an express lane: first come, first served.")
    ] = False,
    tier: Annotated[
        list[str] | None,
        typer.Option(help="A lower cache tier of each replica, BLOCKS:GB/s; repeat for further ones."),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(help="fail:3@600, leave:0@900 or join@1200 (replica, seconds); repeat for more."),
    ] = None,
    routers: Annotated[int, typer.Option(help="Routers in front of the fleet.")] = 1,
    event_delay: Annotated[float, typer.Option(help="Seconds until routers hear of a replica.")] = 0.01,
    eviction: Annotated[str, typer.Option(help="Eviction policy of the replicas' caches.")] = "reuse",
    scale: Annotated[float, typer.Option(help="Multiply lengths by this (traces of hash ids).")] = 1.0,
    arrivals: Annotated[str | None, typer.Option(help="Take the arrival times of this trace.")] = None,
    session_gap: Annotated[
        float | None, typer.Option(help="Mean seconds between session starts, where there is no clock.")
    ] = None,
    trace_block_size: Annotated[
        int | None, typer.Option(help="Tokens per hash id of the trace (default: the format's).")
    ] = None,
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
    check_report(report_file, json_file)
    speeds = numbers(speed, "--speed")
    if pooled:
        given = {"--report": report_file, "--tier": tier, "--change": change, "--fcfs": fcfs}
        _check_pooled({**given, "--replica-speed": replica_speed != "1"}, speed)
    elif round_up:
        raise OptionError("--round-up is about one pool: it goes with --pooled")
    config = FleetConfig(
        replicas=replicas,
        blocks=blocks,
        block_size=block_size,
        timing=Timing.named(timing),
        routers=routers,
        event_delay_s=event_delay,
        eviction=eviction,
        seed=seed,
        speeds=numbers(replica_speed, "--replica-speed"),
        express=not fcfs,
        tiers=tuple(map(TierConfig.parse, tier or ())),
        changes=tuple(map(Change.parse, change or ())),
    )
    options = TraceOptions(scale, trace_block_size, seed=seed)
    requests, skipped, estimated = read_timed(trace, options, limit, skip_bad, session_gap, arrivals)
    console = Console(stderr=json_file == "-")
    try:
        if pooled:
            names = split_names(policy or "lru,reuse")
            report = _pooled(requests, PooledOptions(blocks, block_size, speeds[0], round_up), names)
            console.print(_pooled_table(report))
        else:
            names = split_names(policy or "cache_aware,least_load,round_robin")
            report, watched = _fleet(requests, config, names, speeds, watch=report_file is not None)
            _print_whole(console, _fleet_table(report))
            for run in report["runs"]:
                if run["refused"]:
                    console.print(
                        f"{run['policy']}, speed {run['speed']:g}: {run['refused']:,} requests refused"
                    )
    except (InvalidRequest, MemoryError) as error:
        raise OptionError(str(error) or "there is not enough memory for this") from error
    if estimated:
        console.print("The trace has text: four bytes count as a token.")
    deliver({"trace": trace, "estimated_tokens": estimated, **report}, json_file)
    if report_file is not None:
        write_simulation(report_file, trace, timing, config, report["bounds"], watched)
    tell_skipped(skipped)


def numbers(text: str, option: str) -> tuple[float, ...]:
    """Positive numbers separated by commas. Raises `OptionError`, which names the option."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"{option} takes numbers separated by commas, not {text!r}") from None
    if not all(1 / MAX_SPEED <= number <= MAX_SPEED for number in found):
        raise OptionError(f"{option} takes positive numbers up to {MAX_SPEED:g}, not {text!r}")
    return found


def _check_pooled(fleets: Mapping[str, object], speed: str) -> None:
    """Raise `OptionError` for options that only fleets have, and for several speeds."""
    for option, given in fleets.items():
        if given:
            raise OptionError(f"{option} is about fleets: it cannot be had with --pooled")
    if "," in speed:
        raise OptionError(f"--pooled takes one --speed, not {speed!r}")


def split_names(text: str) -> list[str]:
    """Names separated by commas, with or without spaces."""
    return [name.strip() for name in text.split(",")]


def read_timed(
    trace: str,
    options: TraceOptions,
    limit: int | None,
    skip_bad: bool,
    session_gap_s: float | None,
    arrivals: str | None,
) -> tuple[list[Request], Sequence[TraceError], bool]:
    """The requests of a trace in the order of their times, the lines left out, and whether prompts are text,
    whose tokens are estimated."""
    if session_gap_s is not None:
        options = replace(options, session_gap_s=session_gap_s)
    requests, skipped = read_requests(trace, options, limit, skip_bad)
    if session_gap_s is not None:
        requests = with_starts(requests, session_gap_s, options.seed)
    if arrivals is not None:
        requests = with_arrivals(requests, read_trace(arrivals))
    estimated = any(request.num_tokens is None for request in requests)
    return in_time_order(requests), skipped, estimated


def _pooled(requests: Sequence[Request], options: PooledOptions, names: Sequence[str]) -> dict[str, Any]:
    prompts = Prompts(requests, options)
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
    check_policies(names)
    bounds = _bounds(requests, config)
    for name in names:  # compiles what is not yet compiled, which no run's time should contain
        Fleet(config, name).run(requests[:_WARM_UP])
    measured = []
    for at in speeds:
        for name in names:
            fleet = Fleet(config, name)
            fleet.measures.journal = Journal(config.block_size) if watch else None
            measured.append((at, fleet.run(faster(requests, at))))
    runs = [{**measures.as_json(), "speed": at} for at, measures in measured]
    return {"bounds": bounds, "runs": runs}, measured


def _bounds(requests: Sequence[Request], config: FleetConfig) -> dict[str, Any]:
    """What no router can pass, of the requests that a replica can hold: nobody is served the others."""
    held = [r for r in requests if config.holds(prompt_length(r), r.max_tokens or 1)]
    if requests and not held:
        room = config.blocks * config.block_size
        raise OptionError(f"no request fits into a replica: --blocks x --block-size are {room:,} tokens")
    pool = PooledOptions(config.members * config.blocks, config.block_size)
    prompts = Prompts(held, pool)
    ideal = resident_hits(held, config.block_size)
    return {
        "infinite": prompts.rate(ideal),
        "pooled_lru": simulate_policy(prompts, pool, "lru")["hit_rate"],
        "pooled_opt": optimum(prompts, pool),
        "ttft_ms": spread(map(config.fastest.alone, prompts.lengths, ideal)),
    }


def _pooled_table(report: dict[str, Any]) -> Table:
    table = Table("policy", title=f"One pool of {report['blocks']:,} blocks of {report['block_size']} tokens")
    table.add_column("hit rate", justify="right")
    for name, run in report["pooled"].items():
        table.add_row(name, f"{run['hit_rate']:.2%}")
    table.add_section()
    table.add_row("offline optimum", f"{report['bounds']['pooled_opt']:.2%}")
    table.add_row("never forgets", f"{report['bounds']['infinite']:.2%}")
    return table


def _print_whole(console: Console, table: Table) -> None:
    """On a line each, even if that is too long: digits that are cut off make another number."""
    wanted = Measurement.get(console, console.options.update(max_width=_ANY_WIDTH), table).maximum
    console.width = max(console.width, wanted)
    console.print(table)


def _fleet_table(report: dict[str, Any]) -> Table:
    """A row per run; fits 80 columns as long as times are not above minutes."""
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
