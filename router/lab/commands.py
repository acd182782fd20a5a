"""`warmroute replay`: a trace against any OpenAI-compatible endpoint."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from router.lab.client import Sampling, Target
from router.lab.errors import OptionError, TraceError, broken_lines
from router.lab.page.replayed import write_replay
from router.lab.progress import progress_bar
from router.lab.record import Request
from router.lab.replay import ReplayOptions
from router.lab.replay import replay as run_replay
from router.lab.report import Report, report_table, write_json
from router.lab.rows import TraceOptions
from router.lab.traces import read_trace

_VOCAB_FLOOR = 1000


def replay(
    trace: Annotated[str, typer.Argument(help="A trace file (plain or gzip), `builtin`, or `builtin:tiny`.")],
    url: Annotated[str, typer.Option(help="Base URL of the endpoint, with or without /v1.")],
    model: Annotated[
        str | None, typer.Option(help="Model to ask for (default: the first that is served).")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Closed loop: requests in flight (default 8).")
    ] = None,
    speed: Annotated[
        float | None, typer.Option(help="Open loop on the trace's clock, this much faster.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Replay only the first so many requests.")] = None,
    scale: Annotated[float, typer.Option(help="Mooncake traces: multiply lengths by this.")] = 1.0,
    block_size: Annotated[
        int | None, typer.Option(help="Mooncake traces: tokens per hash id (inferred).")
    ] = None,
    vocab: Annotated[int, typer.Option(help="Mooncake traces: synthesize token ids below this.")] = 30_000,
    context: Annotated[
        int | None, typer.Option(help="Context length in tokens (default: the endpoint's).")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Length of answers the trace does not give.")] = 16,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Ask for answers of full length.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds from sending a request to its end.")] = 300.0,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave broken lines of the trace out, and say how many.")
    ] = False,
    policy: Annotated[str | None, typer.Option(help="A label for the report.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the report here (- for stdout).")
    ] = None,
    report_file: Annotated[
        str | None, typer.Option("--report", help="Write a page about the replay here (HTML, one file).")
    ] = None,
) -> None:
    """Replay a trace against an OpenAI-compatible endpoint and report hit rate and latencies.

    Ctrl-C ends the replay with the report of what was sent so far. The exit status is 130 then, and 1 if any
    request that was sent failed.
    """
    options = ReplayOptions(
        concurrency=concurrency,
        speed=speed,
        limit=limit,
        timeout_s=timeout,
        context_length=context,
        sampling=Sampling(max_tokens, temperature, ignore_eos),
        policy=policy,
    )
    check_writable(json_file)
    check_report(report_file, json_file)
    reading = TraceOptions(scale, block_size, (min(_VOCAB_FLOOR, vocab // 4), vocab))
    requests, skipped = read_requests(trace, reading, limit, skip_bad)
    report = asyncio.run(_run(requests, Target(url, model, api_key), options))
    present([report], report.as_json(), json_file)
    if report_file is not None:
        write_replay(report_file, trace, url, options, report)
    tell_skipped(skipped)
    raise typer.Exit(_status(report))


def read_requests(
    trace: str, reading: TraceOptions, limit: int | None, skip_bad: bool
) -> tuple[list[Request], list[TraceError]]:
    """The requests, and the broken lines between them; those are an error unless they are to be skipped."""
    bad: list[TraceError] = []
    try:
        requests = list(islice(read_trace(trace, reading, bad.append), limit))
    except TraceError as error:
        if bad:
            raise broken_lines(bad, error.what) from error
        raise
    if bad and not skip_bad:
        raise broken_lines(bad, "--skip-bad leaves such lines out")
    tell_skipped(bad)  # a long replay should not begin before one knows
    return requests, bad


def tell_skipped(bad: Sequence[TraceError]) -> None:
    """One line on stderr about the lines that were left out, if any."""
    if bad:
        typer.echo(f"{len(bad)} broken {'line' if len(bad) == 1 else 'lines'} skipped: {bad[0]}", err=True)


def check_writable(json_file: str | None) -> None:
    """Complain before the replay, not after it, about a report that could not be kept."""
    if json_file in (None, "-"):
        return
    path = Path(str(json_file))
    if path.is_dir() or not path.parent.is_dir():
        raise OptionError(f"cannot write {json_file}: {'a folder' if path.is_dir() else 'no such folder'}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OptionError(f"cannot write {json_file}: no permission")


def check_report(report_file: str | None, json_file: str | None) -> None:
    """Complain before the replay, not after it, about a page that could not be written, or would replace
    the JSON."""
    if report_file is not None and report_file == json_file:
        raise OptionError(f"--json and --report cannot both write {report_file}")
    if report_file == "-":
        raise OptionError("--report needs the name of a file: the table goes to stdout")
    check_writable(report_file)


async def _run(requests: Sequence[Request], target: Target, options: ReplayOptions) -> Report:
    stop = asyncio.Event()
    with _until_interrupted(stop), progress_bar("replay") as progress:
        return await run_replay(requests, target, options, progress, stop)


@contextlib.contextmanager
def _until_interrupted(stop: asyncio.Event) -> Iterator[None]:
    """While inside, the first Ctrl-C sets `stop`; a second one ends the program as usual."""
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)

    def forget() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)

    def interrupted() -> None:
        stop.set()
        forget()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        forget()


def _status(report: Report) -> int:
    """130 after Ctrl-C, as shells have it; 1 when a request failed, or none could be sent."""
    return 130 if report.interrupted else int(report.failed > 0 or report.failed_entirely)


def present(reports: Sequence[Report], value: Any, json_file: str | None) -> None:
    """The table on stdout (stderr if the JSON goes there), what went wrong on stderr, JSON to its file.

    Raises:
        OptionError: the file cannot be written.
    """
    errors = Console(stderr=True, highlight=False)
    console = errors if json_file == "-" else Console()
    console.print(report_table(reports))
    for report in reports:
        label = f"{report.policy}: " if report.policy else ""
        for kind, count in report.errors.items():
            errors.print(f"{label}{count} x {kind}", markup=False)
        for note in report.notes:
            errors.print(f"{label}for example {note}", markup=False, soft_wrap=True)
    deliver(value, json_file)


def deliver(value: Any, json_file: str | None) -> None:
    """The value as JSON in its file, or on stdout for "-". Raises OptionError: the file cannot be written."""
    if json_file == "-":
        sys.stdout.write(write_json(value))
    elif json_file is not None:
        try:
            Path(json_file).write_text(write_json(value), encoding="utf-8")
        except OSError as error:
            raise OptionError(f"cannot write {json_file}: {error.strerror}") from error
