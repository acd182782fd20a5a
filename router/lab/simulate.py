"""`warmroute simulate`: hit rates of a trace without a cluster."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvcore.errors import InvalidRequest
from router.lab.commands import check_writable, deliver, read_requests, tell_skipped
from router.lab.errors import OptionError
from router.lab.pooled import PooledOptions, Prompts, infinite, optimum, simulate_policy
from router.lab.rows import TraceOptions


def simulate(
    trace: Annotated[str, typer.Argument(help="A trace file with hash ids or token ids, plain or gzip.")],
    pooled: Annotated[bool, typer.Option("--pooled", help="One cache for the whole fleet.")] = False,
    blocks: Annotated[int, typer.Option(help="Blocks of the pool.")] = 16_000,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 512,
    policy: Annotated[str, typer.Option(help="Eviction policies, separated by commas.")] = "lru,reuse",
    speed: Annotated[float, typer.Option(help="Arrivals, this much faster.")] = 1.0,
    round_up: Annotated[
        bool, typer.Option("--round-up", help="Count the last part of a prompt as a block.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave broken lines out.")] = False,
    json_file: Annotated[str | None, typer.Option("--json", help="Write JSON here (- for stdout).")] = None,
) -> None:
    """Hit rates of a trace's prompts in one pool of blocks, by eviction policy, beside two bounds."""
    if not pooled:
        raise OptionError("only pooled simulations are offered so far: add --pooled")
    check_writable(json_file)
    options = PooledOptions(blocks, block_size, speed, round_up)
    requests, skipped = read_requests(trace, TraceOptions(block_size=block_size), limit, skip_bad)
    prompts = Prompts.of(requests, options)
    try:
        runs = {name: simulate_policy(prompts, options, name) for name in policy.split(",")}
    except (InvalidRequest, MemoryError) as error:
        raise OptionError(str(error)) from error
    bounds = {"infinite": infinite(prompts, options), "pooled_opt": optimum(prompts, options)}
    Console(stderr=json_file == "-").print(_table(len(prompts.tokens), options, runs, bounds))
    report = {"trace": trace, "blocks": blocks, "block_size": block_size, "bounds": bounds, "pooled": runs}
    deliver(report, json_file)
    tell_skipped(skipped)


def _table(
    requests: int, options: PooledOptions, runs: dict[str, dict[str, float]], bounds: dict[str, float]
) -> Table:
    table = Table("policy", title=f"{requests:,} requests, {options.blocks:,} blocks of {options.block_size}")
    table.add_column("hit rate", justify="right")
    for name, run in runs.items():
        table.add_row(name, f"{run['hit_rate']:.2%}")
    table.add_section()
    table.add_row("offline optimum", f"{bounds['pooled_opt']:.2%}")
    table.add_row("never forgets", f"{bounds['infinite']:.2%}")
    return table
