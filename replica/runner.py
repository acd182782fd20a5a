"""Runs a plan in two parts: `launch` lays out and starts the forward pass and draws, `collect` reads them.

On a GPU `launch` returns while the device computes, and a next step can be launched on what this one draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from replica.batch import ForwardBatch, IntArray
from replica.beams import candidates_kept
from replica.drafts import came_true
from replica.draws import Draws, begin
from replica.model_config import ModelConfig
from replica.plan import Chunk, Plan
from replica.sampler import Row, TokenLogprobs
from replica.sequence import Sequence
from replica.staging import Staging


class ForwardModel(Protocol):
    """What the engine needs of a model."""

    config: ModelConfig

    def forward(self, batch: ForwardBatch, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Write the KV of the batch's tokens, return float[len(batch.logit_rows), vocab_size].

        `drawn`: what the step before has drawn, for token ids that refer to it.
        """

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        """For each (src, dst, n), copy the KV of the first n tokens of block src to block dst."""

    def close(self) -> None:
        """End what else it keeps running, such as other ranks; nothing is computed after this."""


@dataclass(frozen=True)
class Draw:
    """What was drawn for one sequence: a token, and another one after each draft that came true.

    A token of -1 stands for logits that are not finite. `logprobs` has one entry per token.
    """

    chunk: Chunk
    seq: Sequence
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


@dataclass(frozen=True)
class Launched:
    """A step that the device may still be at.

    Attributes:
        drawers: who draws, and from which chunk.
        draws: of their rows; None if there are none.
        row_of: the row of each sequence that draws one token.
    """

    drawers: list[tuple[Chunk, Sequence]]
    draws: Draws | None
    row_of: dict[Sequence, int]

    @property
    def can_go_on(self) -> bool:
        """Whether a next step can be launched on it: what is drawn stays on the device, for one sequence a
        chunk."""
        if self.draws is None:
            return True
        alone = all(seq is chunk.seq and not seq.forks for chunk, seq in self.drawers)
        return alone and self.draws.tokens is not None


class Runner:
    """One model on one device, driven plan by plan."""

    def __init__(
        self, model: ForwardModel, block_size: int, stop_ids: frozenset[int], vocab_size: int
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._stop_ids = stop_ids
        self._vocab_size = vocab_size
        self._staging: Staging | None = None

    @torch.inference_mode()
    def launch(self, plan: Plan, before: Launched | None = None) -> Launched:
        """Start computing the chunks and drawing for the sequences whose end is reached.

        `before` is the step still running, if there is one.
        """
        if plan.copies:
            self._model.copy_blocks(plan.copies)
        logits = self._forward(plan, before)
        drawers = [(chunk, seq) for chunk in plan.chunks for seq in chunk.drawers]
        if not drawers:
            return Launched([], None, {})
        if self._staging is None:
            self._staging = Staging(logits.device)
        source = self._logit_rows(plan)
        if source != list(range(len(logits))):
            logits = logits[self._staging.put([np.array(source, dtype=np.int64)])[0]]
        rows = [row for chunk, seq in drawers for row in self._rows(chunk, seq)]
        row_of = {seq: row for row, (_, seq) in enumerate(drawers)}  # only used where nobody has drafts
        return Launched(drawers, begin(logits, rows, self._staging), row_of)

    @torch.inference_mode()
    def collect(self, launched: Launched) -> list[Draw]:
        """What was drawn, once it is known."""
        if launched.draws is None:
            return []
        sampled = launched.draws.result()
        draws, start = [], 0
        for chunk, seq in launched.drawers:
            end = start + 1 + came_true(chunk.drafts, sampled.tokens[start:])
            draws.append(Draw(chunk, seq, sampled.tokens[start:end], sampled.logprobs[start:end]))
            start += 1 + len(chunk.drafts)
        return draws

    def _forward(self, plan: Plan, before: Launched | None) -> torch.Tensor:
        batch = ForwardBatch.build([self._sequence(chunk, before) for chunk in plan.chunks], self._block_size)
        if not any(chunk.carried for chunk in plan.chunks):
            return self._model.forward(batch)
        assert before is not None and before.draws is not None, "what is carried over is being drawn"
        return self._model.forward(batch, before.draws.tokens)

    def _sequence(self, chunk: Chunk, before: Launched | None) -> tuple[IntArray, int, IntArray, int]:
        """The chunk as `ForwardBatch.build` takes it."""
        lease = chunk.seq.lease
        assert lease is not None, "what is planned holds its blocks"
        tokens: IntArray = lease.tokens[chunk.start : chunk.end]
        if chunk.carried:
            assert before is not None, "what is carried over is being drawn"
            tokens = np.array([-1 - before.row_of[chunk.seq]])
        return tokens, chunk.start, lease.blocks[: -(-chunk.end // self._block_size)], _rows_wanted(chunk)

    def _logit_rows(self, plan: Plan) -> list[int]:
        """The row of logits for each draw: siblings share one, drafts have one each."""
        source, start = [], 0
        for chunk in plan.chunks:
            wanted = _rows_wanted(chunk)
            source += list(range(start, start + wanted)) * len(chunk.drawers)
            start += wanted
        return source

    def _rows(self, chunk: Chunk, seq: Sequence) -> list[Row]:
        """One row per draft and one more, each as if the drafts before it had been drawn."""
        drafts = chunk.drafts
        drafted = ([*seq.outputs, *drafts[: count + 1]] for count in range(len(drafts)))
        return [self._row(seq, outputs, int(chunk.carried)) for outputs in (seq.outputs, *drafted)]

    def _row(self, seq: Sequence, outputs: list[int], ahead: int) -> Row:
        params, forbidden, candidates = seq.sampling, frozenset[int](), 0
        if len(outputs) + ahead < params.min_tokens:
            ends = self._stop_ids | params.stop_token_ids
            forbidden = frozenset(token for token in ends if 0 <= token < self._vocab_size)
        if params.use_beam_search:
            kept = candidates_kept(params, len(params.ending_ids(self._stop_ids)))
            candidates = max(kept, params.logprobs or 0)
        return Row(params, seq.seed, seq.request.tokens, outputs, forbidden, candidates, ahead)


def _rows_wanted(chunk: Chunk) -> int:
    return 1 + len(chunk.drafts) if chunk.samples else 0
