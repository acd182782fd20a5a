"""`warmroute trace`: what a trace is like, and traces made of a few parameters."""

from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from router.lab.commands import check_writable, deliver, read_requests, tell_skipped
from router.lab.modifiers import faster, with_arrivals, with_starts
from router.lab.rows import TraceOptions
from router.lab.source import write_rows
from router.lab.stats import trace_stats
from router.lab.stats_view import stats_tables
from router.lab.synth import KINDS, SynthConfig, preset, synthesize_trace
from router.lab.traces import read_trace
from router.lab.uses import Uses

trace = typer.Typer(
    help="Look into traces and make them.", no_args_is_help=True, pretty_exceptions_enable=False
)


@trace.command()
def stats(
    trace: Annotated[str, typer.Argument(help="A trace file (plain or gzip), `builtin`, or `builtin:tiny`.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
    speed: Annotated[float, typer.Option(help="Arrivals and think times, this much faster.")] = 1.0,
    scale: Annotated[float, typer.Option(help="Multiply lengths by this (traces of hash ids).")] = 1.0,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per hash id (default: the format's).")
    ] = None,
    arrivals: Annotated[str | None, typer.Option(help="Take the arrival times of this trace.")] = None,
    session_gap: Annotated[
        float | None, typer.Option(help="Mean seconds between session starts, where there is no clock.")
    ] = None,
    seed: Annotated[int, typer.Option(help="For the session starts.")] = 0,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave broken lines out.")] = False,
    json_file: Annotated[str | None, typer.Option("--json", help="Write JSON here (- for stdout).")] = None,
) -> None:
    """Lengths, arrivals, and what there is to hit: in all, by cache size, by reuse distance, by prefix."""
    check_writable(json_file)
    options = TraceOptions(scale, block_size, seed=seed)
    if session_gap is not None:
        options = replace(options, session_gap_s=session_gap)
    requests, skipped = read_requests(trace, options, limit, skip_bad)
    if session_gap is not None:
        requests = with_starts(requests, session_gap, seed)
    if arrivals is not None:
        requests = with_arrivals(requests, read_trace(arrivals))
    found = trace_stats(trace, Uses.of(faster(requests, speed)))
    Console(stderr=json_file == "-").print(stats_tables(found))
    deliver(found, json_file)
    tell_skipped(skipped)


@trace.command()
def synth(
    out: Annotated[str, typer.Argument(help="The file to write, JSONL; packed if it ends in .gz.")],
    kind: Annotated[str, typer.Option(help=f"{', '.join(KINDS)}, or mixed.")] = "mixed",
    requests: Annotated[
        int, typer.Option(help="How many, and the rest of the last session.")
    ] = SynthConfig.requests,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = SynthConfig.rate,
    seed: Annotated[int, typer.Option(help="Another seed, another trace of the same kind.")] = 0,
    block_size: Annotated[int, typer.Option(help="Tokens per hash id.")] = SynthConfig.block_size,
    random_share: Annotated[
        float | None, typer.Option(help="Share of random prompts, where every other kind has 1.")
    ] = None,
    skew: Annotated[float, typer.Option(help="Zipf's exponent of tenants and documents.")] = SynthConfig.skew,
    tenants: Annotated[int, typer.Option(help="System prompts of chats.")] = SynthConfig.tenants,
    system_tokens: Annotated[
        int, typer.Option(help="Length of a system prompt.")
    ] = SynthConfig.system_tokens,
    turns: Annotated[float, typer.Option(help="Turns of a chat.")] = SynthConfig.turns,
    question_tokens: Annotated[
        int, typer.Option(help="Length of what a user says.")
    ] = SynthConfig.question_tokens,
    answer_tokens: Annotated[int, typer.Option(help="Length of an answer.")] = SynthConfig.answer_tokens,
    think_s: Annotated[
        float, typer.Option("--think", help="Seconds before a user's turn.")
    ] = SynthConfig.think_s,
    tool_tokens: Annotated[
        int, typer.Option(help="Length of agents' tool schemas.")
    ] = SynthConfig.tool_tokens,
    steps: Annotated[float, typer.Option(help="Calls of an agent.")] = SynthConfig.steps,
    result_tokens: Annotated[
        int, typer.Option(help="Length of a tool's result.")
    ] = SynthConfig.result_tokens,
    tool_s: Annotated[float, typer.Option("--tool", help="Seconds that a tool takes.")] = SynthConfig.tool_s,
    document_count: Annotated[
        int, typer.Option("--documents", help="Number of documents.")
    ] = SynthConfig.document_count,
    document_tokens: Annotated[int, typer.Option(help="Length of a document.")] = SynthConfig.document_tokens,
    random_tokens: Annotated[
        int, typer.Option(help="Length of a random prompt.")
    ] = SynthConfig.random_tokens,
) -> None:
    """Make a trace of chats, agents, questions on documents, a shared prompt, and random prompts.

    Lengths and counts are means. The file is in Mooncake's format and can be read by every command.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    del given["out"], given["kind"]
    given |= {"random": given.pop("random_share")} if random_share is not None else {}
    check_writable(out)
    rows = synthesize_trace(preset(kind, **given))
    write_rows(rows, out)
    typer.echo(f"{len(rows):,} requests in {out}")
