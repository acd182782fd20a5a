"""`warmroute bench kvcore`: what one request costs in the prefix cache, beside SGLang's and vLLM's caches.

All caches get the same prompts in turn, 16 requests at a time, so that noise on the machine hits all alike;
figures are medians in microseconds once the pool is full and every new block evicts one. A cycle includes
hashing the prompt and recording the events; their consumer takes them after each turn, which is timed apart.
The clock is the CPU time of the thread: nothing here waits, and what else runs on the machine does not count.
"""

from __future__ import annotations

import gc
import logging
import sys
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from statistics import fmean, median
from time import thread_time_ns
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from replica.bench_json import check_json, deliver_json
from replica.bench_peers import VLLM, SGLang, Subject, Warmroute
from replica.bench_streams import Ask, mixed, multi_turn

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16
LENGTH = 8192
LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
TURN = 16


class Times(NamedTuple):
    """Microseconds of one cache: per cycle by kind of request, and per cycle for taking events."""

    by_kind: dict[str, list[float]]
    hits: list[int]
    drain_us: float

    @property
    def median_us(self) -> float:
        """Over all requests."""
        return median(time for times in self.by_kind.values() for time in times)


def kvcore(
    num_blocks: Annotated[
        int, typer.Option(min=2048, max=(1 << 30) - 1, help="Blocks of 16 tokens in the pool.")
    ] = 100_000,
    requests: Annotated[int, typer.Option(min=5, help="Timed requests per cache and workload.")] = 500,
    longest: Annotated[
        int, typer.Option(min=2048, help="Longest prompt of the growth with length.")
    ] = 65_536,
    peers: Annotated[bool, typer.Option(help="Time SGLang and vLLM too, where installed.")] = True,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write figures to a file, - for stdout.")
    ] = None,
) -> None:
    """One request cycle of the prefix cache: medians, growth with the prompt, memory; beside its peers."""
    check_json(json_file)
    if longest > num_blocks * BLOCK_SIZE:
        message = f"a prompt of {longest} tokens does not fit into {num_blocks} blocks of {BLOCK_SIZE}"
        raise typer.BadParameter(message, param_hint="--longest")
    figures, table = measure(num_blocks, requests, longest, peers)
    # With JSON on stdout, everything for the eye goes to stderr, so that stdout can be parsed whole.
    Console(file=sys.stderr if json_file == "-" else sys.stdout).print(table)
    deliver_json(figures, json_file)


def measure(num_blocks: int, requests: int, longest: int, peers: bool) -> tuple[dict[str, float], Table]:
    """All figures, JSON-ready, and the table that shows them."""
    table = _empty_table(num_blocks)
    figures: dict[str, float] = {}
    length = min(LENGTH, longest)
    for title, suffix, stream, warm_up in (
        (f"{length:,} tokens, mixed hits", "", _mixed(num_blocks, length), _filling(num_blocks, length)),
        ("multi-turn", "_multiturn", multi_turn(), num_blocks // 40),
    ):
        subjects = _subjects(num_blocks, max(length, 12_000), peers)
        for name, times in run(subjects, stream, warm_up, requests).items():
            figures[f"{name}_us{suffix}"] = round(times.median_us, 1)
            _add_rows(table, title, name, times)
        if not suffix:
            figures["bytes_per_block"] = round(subjects[0].cache.nbytes / num_blocks, 1)
    figures |= _growth(num_blocks, max(requests // 5, 5), longest)
    figures["traced_bytes_per_block"] = round(traced_bytes(num_blocks, length) / num_blocks, 1)
    for name in ("exponent", "bytes_per_block", "traced_bytes_per_block"):
        table.add_row(name, "", f"{figures[name]:g}", "", "", "")
    return figures, table


def run(subjects: list[Any], stream: Iterator[Ask], warm_up: int, requests: int) -> dict[str, Times]:
    """Send the stream to the subjects in turn; times of what follows the warm-up, by name of the subject."""
    times = {subject.name: Times(defaultdict(list), [], 0.0) for subject in subjects}
    drained: dict[str, int] = defaultdict(int)
    for start in range(0, warm_up + requests, TURN):
        asks = list(islice(stream, min(TURN, warm_up + requests - start)))
        for subject in subjects:
            for number, ask in enumerate(asks, start):
                hit, cycle_us = _timed_cycle(subject, ask)
                if number >= warm_up:
                    times[subject.name].by_kind[ask.kind].append(cycle_us)
                    times[subject.name].hits.append(hit)
            started = thread_time_ns()
            subject.drain()
            drained[subject.name] += thread_time_ns() - started
    total = (warm_up + requests) * 1e3
    return {name: result._replace(drain_us=drained[name] / total) for name, result in times.items()}


def traced_bytes(num_blocks: int, length: int) -> int:
    """Bytes that a warm cache holds according to the allocator: arrays, events, everything of ours."""
    gc.collect()
    tracemalloc.start()
    try:
        subject = Warmroute(num_blocks, BLOCK_SIZE)
        for ask in islice(_mixed(num_blocks, length), _filling(num_blocks, length)):
            subject.cycle(ask.tokens)
        del ask
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def _timed_cycle(subject: Subject, ask: Ask) -> tuple[int, float]:
    prompt = subject.prepare(ask.tokens)
    started = thread_time_ns()
    hit = subject.cycle(prompt)
    return hit, (thread_time_ns() - started) / 1e3


def _growth(num_blocks: int, requests: int, longest: int) -> dict[str, float]:
    """Our cycle at the longest prompt, and the exponent of cost against length over all lengths."""
    lengths = [length for length in LENGTHS if length <= longest]
    medians = []
    for length in lengths:
        warm_up = _filling(num_blocks, length)
        subject = Warmroute(num_blocks, BLOCK_SIZE)
        medians.append(run([subject], _mixed(num_blocks, length), warm_up, requests)[subject.name].median_us)
    exponent = float(np.polyfit(np.log(lengths), np.log(medians), 1)[0])
    return {f"cycle_us_{lengths[-1]}": round(medians[-1], 1), "exponent": round(exponent, 3)}


def _mixed(num_blocks: int, length: int) -> Iterator[Ask]:
    """Mixed hits on as many prompts as a third of the pool holds, so that all of them stay resident."""
    return mixed(length, max(num_blocks * BLOCK_SIZE // length // 3, 1))


def _filling(num_blocks: int, length: int) -> int:
    """Requests of `mixed` that fill the pool and a third more: on average half of a prompt is new."""
    return 2 * num_blocks * BLOCK_SIZE // length * 4 // 3 + 8


def _subjects(num_blocks: int, longest: int, peers: bool) -> list[Any]:
    subjects: list[Any] = [Warmroute(num_blocks, BLOCK_SIZE)]
    makers = {
        "SGLang": lambda: SGLang(num_blocks, BLOCK_SIZE, events=False),
        "SGLang with events": lambda: SGLang(num_blocks, BLOCK_SIZE, events=True),
        "vLLM": lambda: VLLM(num_blocks, BLOCK_SIZE, longest=longest),
    }
    for name, make in makers.items() if peers else ():
        try:
            subjects.append(make())
        except (
            Exception
        ) as error:  # a peer's import probes devices and libraries: anything can go wrong there
            logger.warning("%s is not measured: %s: %s", name, type(error).__name__, error)
    return subjects


def _empty_table(num_blocks: int) -> Table:
    table = Table(title=f"One request cycle, {num_blocks:,} blocks of {BLOCK_SIZE}, eviction on; µs")
    table.add_column("workload")
    table.add_column("cache")
    for name in ("median", "p90", "mean hit", "events taken"):
        table.add_column(name, justify="right")
    return table


def _add_rows(table: Table, title: str, name: str, times: Times) -> None:
    everything = sorted(time for kind in times.by_kind.values() for time in kind)
    p90 = everything[len(everything) * 9 // 10]
    hit, drain = f"{fmean(times.hits):,.0f}", f"{times.drain_us:.1f}"
    table.add_row(
        title, name.replace("cycle", "warmroute"), f"{times.median_us:.1f}", f"{p90:.1f}", hit, drain
    )
    for kind in sorted(times.by_kind, key=lambda kind: (len(kind), kind)) if len(times.by_kind) > 1 else ():
        table.add_row(f"  {kind}", "", f"{median(times.by_kind[kind]):.1f}", "", "", "")
