"""`warmroute bench engine`: time to first token cold and warm, prefill and decode rates, step times."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.console import Console
from rich.table import Table

from replica.bench_drafts import measure_drafts
from replica.bench_json import check_json, deliver_json
from replica.bench_steps import measure_steps
from replica.build import build_engine
from replica.config import EngineConfig
from replica.engine import Engine
from replica.errors import ReplicaError
from replica.request import Request, SamplingParams

BLOCK_SIZE = 16
DECODE_PROMPT = 128
DECODE_STEPS = 48
BATCHES = (1, 8)


def engine(
    model: Annotated[
        str, typer.Option(help="Model name, .gguf file or Hugging Face folder.")
    ] = "smollm2-135m",
    prompt_tokens: Annotated[
        int, typer.Option(min=2, help="Length of the prompt that is sent twice.")
    ] = 1500,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Torch threads (default: torch's choice).")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Different prompts; figures are medians.")] = 3,
    draft_tokens: Annotated[
        int, typer.Option(min=0, help="Also measure quoting with and without this many drafts a step.")
    ] = 0,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write figures to a file, - for stdout.")
    ] = None,
) -> None:
    """Send prompts twice to one engine, then decode batches of 1 and 8; prints medians."""
    check_json(json_file)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        figures = measure(model, prompt_tokens, repeats)
        if draft_tokens:
            figures["drafts"] = measure_drafts(model, draft_tokens, repeats)
    except ReplicaError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    # With JSON on stdout, everything for the eye goes to stderr, so that stdout can be parsed whole.
    Console(file=sys.stderr if json_file == "-" else sys.stdout).print(_table(figures))
    deliver_json(figures, json_file)


def measure(model: str, prompt_tokens: int, repeats: int) -> dict[str, Any]:
    """All figures as one JSON-ready dict. Raises `ReplicaError`."""
    longest = max(prompt_tokens, DECODE_PROMPT + DECODE_STEPS + max(BATCHES)) + 2
    blocks = (repeats + max(BATCHES) + 1) * (longest // BLOCK_SIZE + 2)
    config = EngineConfig(model=model, num_blocks=blocks, max_model_len=longest, hash_secret=b"bench")
    subject = build_engine(config)
    prompts = Prompts(subject)
    first_token(subject, prompts.next(DECODE_PROMPT))  # the first pass pays for lazy initialisation
    pairs = [_twice(subject, prompts.next(prompt_tokens)) for _ in range(repeats)]
    cold, warm = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "model": model,
        "threads": torch.get_num_threads(),
        "prompt_tokens": prompt_tokens,
        "repeats": repeats,
        "ttft_cold_ms": round(cold * 1e3, 3),
        "ttft_warm_ms": round(warm * 1e3, 3),
        "ttft_speedup": round(cold / warm, 2),
        "prefill_tokens_per_s": round(prompt_tokens / cold, 1),
        "decode_tokens_per_s": {
            str(batch): round(decode_rate(subject, [prompts.next(DECODE_PROMPT) for _ in range(batch)]), 1)
            for batch in BATCHES
        },
        "steps": measure_steps(subject, prompts.next, longest - 2, max(BATCHES), repeats),
    }


class Prompts:
    """Different random prompts, the same ones in every run. Tokens that end a text are left out."""

    def __init__(self, subject: Engine) -> None:
        self._random = np.random.default_rng(0)
        ends = subject.tokenizer.eos_ids
        self._ids = np.array([i for i in range(subject.vocab_size) if i not in ends], dtype=np.int32)

    def next(self, length: int) -> npt.NDArray[np.int32]:
        """int32[length]"""
        return self._random.choice(self._ids, length).astype(np.int32)


def first_token(subject: Engine, prompt: npt.NDArray[np.int32]) -> float:
    """Seconds from `add` to the first token; the request is dropped then."""
    started = time.perf_counter()
    subject.add(Request("ttft", prompt, _sampling(2)))
    while not subject.step():
        pass
    seconds = time.perf_counter() - started
    subject.abort("ttft")
    return seconds


def decode_rate(subject: Engine, prompts: list[npt.NDArray[np.int32]], steps: int = DECODE_STEPS) -> float:
    """Tokens per second while all prompts decode together, prefill not counted."""
    for index, prompt in enumerate(prompts):
        subject.add(Request(f"decode-{index}", prompt, _sampling(steps + len(prompts) + 1)))
    while len(subject.step()) < len(prompts):
        pass
    started = time.perf_counter()
    for _ in range(steps):
        subject.step()
    seconds = time.perf_counter() - started
    for index in range(len(prompts)):
        subject.abort(f"decode-{index}")
    return len(prompts) * steps / seconds


def _twice(subject: Engine, prompt: npt.NDArray[np.int32]) -> tuple[float, float]:
    return first_token(subject, prompt), first_token(subject, prompt)


def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def _table(figures: dict[str, Any]) -> Table:
    table = Table(
        title=f"{figures['model']}, {figures['threads']} threads, {figures['prompt_tokens']} prompt tokens"
    )
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_row("time to first token, cold", f"{figures['ttft_cold_ms']:.1f} ms")
    table.add_row("time to first token, warm", f"{figures['ttft_warm_ms']:.1f} ms")
    table.add_row("speed-up", f"{figures['ttft_speedup']:.1f}x")
    table.add_row("prefill", f"{figures['prefill_tokens_per_s']:.0f} tokens/s")
    for batch, rate in figures["decode_tokens_per_s"].items():
        table.add_row(f"decode, batch {batch}", f"{rate:.1f} tokens/s")
    if drafts := figures.get("drafts"):
        table.add_row("quoting, no drafts", f"{drafts['decode_tokens_per_s_without']:.1f} tokens/s")
        table.add_row(
            f"quoting, {drafts['draft_tokens']} drafts", f"{drafts['decode_tokens_per_s']:.1f} tokens/s"
        )
        table.add_row("drafts accepted", f"{drafts['acceptance']:.0%}")
    return table
