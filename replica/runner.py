"""Runs a plan: lays out the forward pass, computes logits, draws tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from replica.batch import ForwardBatch
from replica.beams import candidates_kept
from replica.drafts import came_true
from replica.model_config import ModelConfig
from replica.plan import Chunk, Plan
from replica.sampler import Row, TokenLogprobs, sample
from replica.sequence import Sequence


class ForwardModel(Protocol):
    """What the engine needs of a model."""

    config: ModelConfig

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the KV of the batch's tokens, return float[len(batch.logit_rows), vocab_size]."""

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


class Runner:
    """One model on one device, driven plan by plan."""

    def __init__(
        self, model: ForwardModel, block_size: int, stop_ids: frozenset[int], vocab_size: int
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._stop_ids = stop_ids
        self._vocab_size = vocab_size

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Draw]:
        """Compute the chunks; what was drawn for the sequences whose end was reached."""
        if plan.copies:
            self._model.copy_blocks(plan.copies)
        logits = self._model.forward(self._batch(plan))
        drawers = [(chunk, seq) for chunk in plan.chunks for seq in chunk.drawers]
        if not drawers:
            return []
        source = self._logit_rows(plan)
        if source != list(range(len(logits))):
            logits = logits[source]
        rows = [row for chunk, seq in drawers for row in self._rows(seq, chunk.drafts)]
        sampled = sample(logits, rows)
        draws, start = [], 0
        for chunk, seq in drawers:
            end = start + 1 + came_true(chunk.drafts, sampled.tokens[start:])
            draws.append(Draw(chunk, seq, sampled.tokens[start:end], sampled.logprobs[start:end]))
            start += 1 + len(chunk.drafts)
        return draws

    def _batch(self, plan: Plan) -> ForwardBatch:
        sequences = []
        for chunk in plan.chunks:
            seq, end = chunk.seq, chunk.start + chunk.count
            assert seq.lease is not None, "what is planned holds its blocks"
            blocks = seq.lease.blocks[: -(-end // self._block_size)]
            tokens = seq.lease.tokens[chunk.start : end]
            sequences.append((tokens, chunk.start, blocks, _rows_wanted(chunk)))
        return ForwardBatch.build(sequences, self._block_size)

    def _logit_rows(self, plan: Plan) -> list[int]:
        """The row of logits for each draw: siblings share one, drafts have one each."""
        source, start = [], 0
        for chunk in plan.chunks:
            wanted = _rows_wanted(chunk)
            source += list(range(start, start + wanted)) * len(chunk.drawers)
            start += wanted
        return source

    def _rows(self, seq: Sequence, drafts: tuple[int, ...]) -> list[Row]:
        """One row per draft and one more, each as if the drafts before it had been drawn."""
        drafted = ([*seq.outputs, *drafts[: count + 1]] for count in range(len(drafts)))
        return [self._row(seq, outputs) for outputs in (seq.outputs, *drafted)]

    def _row(self, seq: Sequence, outputs: list[int]) -> Row:
        params, forbidden, candidates = seq.sampling, frozenset[int](), 0
        if len(outputs) < params.min_tokens:
            ends = self._stop_ids | params.stop_token_ids
            forbidden = frozenset(token for token in ends if 0 <= token < self._vocab_size)
        if params.use_beam_search:
            kept = candidates_kept(params, len(params.ending_ids(self._stop_ids)))
            candidates = max(kept, params.logprobs or 0)
        return Row(params, seq.seed, seq.request.tokens, outputs, forbidden, candidates)


def _rows_wanted(chunk: Chunk) -> int:
    return 1 + len(chunk.drafts) if chunk.samples else 0
