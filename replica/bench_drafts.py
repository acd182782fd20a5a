"""What guessing ahead brings: the same quoting requests with and without drafts, on one engine."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from replica.build import build_engine
from replica.config import EngineConfig
from replica.engine import Engine
from replica.models import load_tokenizer
from replica.request import Request, SamplingParams

TEXT = (
    "The harbour master wrote down every ship that came in: its name, its flag, the goods it carried and "
    "the hour at which it tied up. In the evening he read the list to the clerk, who copied it into a great "
    "book and read it back to him, line by line, until both were sure that nothing was missing. On Fridays "
    "the book went to the customs house, where two others compared it with the letters of the captains."
)
ORDERS = (
    "Repeat this text word for word:",
    "Copy the following text exactly, then copy it again:",
    "Quote the whole of this text:",
)
ANSWER = 64


def measure_drafts(model: str, draft_tokens: int, repeats: int = 3) -> dict[str, Any]:
    """Acceptance, tokens a step and decode rates, as one JSON-ready dict. Raises `ReplicaError`.

    Greedy answers of `ANSWER` tokens to each of `ORDERS`, alone in the engine, with and without drafts in
    turns so that a busy machine slows both; prefill is not counted, rates are of each order's median.
    """
    tokenizer = load_tokenizer(model)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": f"{order}\n\n{TEXT}"}]) for order in ORDERS]
    longest = max(map(len, prompts)) + ANSWER + 1
    config = EngineConfig(
        model=model,
        num_blocks=longest // 4,
        max_model_len=longest,
        draft_tokens=draft_tokens,
        hash_secret=b"b",
    )
    subject = build_engine(config)
    drafter = subject.scheduler.drafter
    _seconds(subject, prompts[0])  # pays for lazy initialisation
    drafted, accepted = subject.drafted, subject.accepted
    without, seconds, steps = 0.0, 0.0, 0
    for prompt in prompts:
        times: dict[bool, list[float]] = {False: [], True: []}
        for drafts in (False, True) * repeats:
            subject.scheduler.drafter = drafter if drafts else None
            taken, count = _seconds(subject, prompt)
            times[drafts].append(taken)
            steps += count if drafts else 0
        without += statistics.median(times[False])
        seconds += statistics.median(times[True])
    drafted, accepted = subject.drafted - drafted, subject.accepted - accepted
    tokens = len(prompts) * (ANSWER - 1)
    return {
        "draft_tokens": draft_tokens,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": round(accepted / max(drafted, 1), 4),
        "tokens_per_step": round(tokens * repeats / steps, 3),
        "decode_tokens_per_s": round(tokens / seconds, 1),
        "decode_tokens_per_s_without": round(tokens / without, 1),
        "speedup": round(without / seconds, 3),
    }


def _seconds(subject: Engine, prompt: npt.NDArray[np.int32]) -> tuple[float, int]:
    """Seconds and steps from the first token to the last."""
    subject.add(Request("quote", prompt, SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)))
    while not subject.step():
        pass
    started, steps = time.perf_counter(), 0
    while subject.has_work():
        subject.step()
        steps += 1
    return time.perf_counter() - started, steps
