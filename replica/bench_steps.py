"""Step times for `warmroute bench engine`: what a step costs by what it computes.

`warmroute simulate --timing` fits its model of an engine to them, so they spread over what the model knows:
tokens of a prompt, tokens cached before them, sequences that decode, and their contexts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from replica.engine import Engine
from replica.request import Request, SamplingParams

Tokens = npt.NDArray[np.int32]

DECODE_STEPS = 12
_PARTS = (16, 4, 1)  # chunks are these parts of the longest one


class Shape(NamedTuple):
    """What a step computes: a chunk of a prompt after `cached_tokens` of it, or a token of each of `decodes`
    sequences with `context_tokens` cached tokens in all."""

    prefill_tokens: int = 0
    cached_tokens: int = 0
    decodes: int = 0
    context_tokens: int = 0


def measure_steps(
    subject: Engine, prompt: Callable[[int], Tokens], length: int, batch: int, repeats: int
) -> list[dict[str, float]]:
    """The shape of each measured step and its `ms`, a median: chunks of three lengths with and without a
    cached beginning, decoding alone and `batch` at a time, and decoding with long contexts.

    `prompt` makes new prompts; with their answers none is longer than `length` tokens, 100 at least. The
    engine must be idle.
    """
    chunk = min(subject.config.max_batch_tokens, length // 2)
    seconds = _prefills(subject, prompt, length, chunk, repeats)
    seconds |= _decodes(subject, prompt, length, chunk, batch)
    return [
        {**shape._asdict(), "ms": round(statistics.median(times) * 1e3, 3)}
        for shape, times in seconds.items()
    ]


def _prefills(
    subject: Engine, prompt: Callable[[int], Tokens], length: int, chunk: int, repeats: int
) -> dict[Shape, list[float]]:
    """Seconds of chunks of `chunk` tokens and less."""
    size = subject.facts.block_size
    cached = (length - chunk) // size * size
    counts = sorted({max(1, chunk // part) for part in _PARTS})
    seconds: dict[Shape, list[float]] = {
        Shape(count, before): [] for before in (0, cached) for count in counts
    }
    for _ in range(repeats):
        beginning = prompt(cached)
        _cache(subject, beginning)
        for shape, times in seconds.items():
            tokens = np.concatenate((beginning[: shape.cached_tokens], prompt(shape.prefill_tokens)))
            times.append(_chunk_s(subject, tokens))
    return seconds


def _decodes(
    subject: Engine, prompt: Callable[[int], Tokens], length: int, chunk: int, batch: int
) -> dict[Shape, list[float]]:
    """Seconds of steps of decoding after one block, and two at a time after a prompt of nearly `length`."""
    size, seconds = subject.facts.block_size, {}
    for rows, context in ((1, size), (batch, size), (2, length)):
        most = DECODE_STEPS + rows * (1 + -(-context // chunk))  # the first decodes while others are computed
        prompts = [prompt(min(context, length - most)) for _ in range(rows)]
        context_tokens = sum(map(len, prompts)) + rows * most // 2
        seconds[Shape(decodes=rows, context_tokens=context_tokens)] = _decode_s(subject, prompts, most)
    return seconds


def _cache(subject: Engine, tokens: Tokens) -> None:
    """Compute a beginning, so that it is cached."""
    subject.add(_request("steps", tokens, 1))
    while subject.has_work():
        subject.step()


def _chunk_s(subject: Engine, tokens: Tokens) -> float:
    """Seconds of the one step that computes what is not cached."""
    subject.add(_request("steps", tokens, 2))
    seconds = _step_s(subject)
    subject.abort("steps")
    return seconds


def _decode_s(subject: Engine, prompts: list[Tokens], max_tokens: int) -> list[float]:
    """Seconds of steps in which all prompts decode together."""
    for index, tokens in enumerate(prompts):
        subject.add(_request(f"steps-{index}", tokens, max_tokens))
    while len(subject.step()) < len(prompts):
        pass
    seconds = [_step_s(subject) for _ in range(DECODE_STEPS)]
    for index in range(len(prompts)):
        subject.abort(f"steps-{index}")
    return seconds


def _step_s(subject: Engine) -> float:
    started = time.perf_counter()
    subject.step()
    return time.perf_counter() - started


def _request(name: str, tokens: Tokens, max_tokens: int) -> Request:
    return Request(name, tokens, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
