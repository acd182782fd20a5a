"""Runs a plan: lays out the forward pass, computes logits, draws tokens."""

from __future__ import annotations

from typing import Protocol

import torch

from replica.batch import ForwardBatch
from replica.model_config import ModelConfig
from replica.sampler import Row, Sampled, sample
from replica.scheduler import Plan
from replica.sequence import Sequence


class ForwardModel(Protocol):
    """What the engine needs of a model."""

    config: ModelConfig

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the KV of the batch's tokens, return float[len(batch.logit_rows), vocab_size]."""

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        """For each (src, dst, n), copy the KV of the first n tokens of block src to block dst."""


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
    def run(self, plan: Plan) -> tuple[list[Sequence], Sampled]:
        """Compute the chunks; the sequences whose last token was reached, and what was drawn for them."""
        if plan.copies:
            self._model.copy_blocks(plan.copies)
        logits = self._model.forward(self._batch(plan))
        sampling = [chunk.seq for chunk in plan.chunks if chunk.samples]
        if not sampling:
            return [], Sampled([], [])
        return sampling, sample(logits, [self._row(seq) for seq in sampling])

    def _batch(self, plan: Plan) -> ForwardBatch:
        sequences = []
        for chunk in plan.chunks:
            seq, end = chunk.seq, chunk.start + chunk.count
            assert seq.lease is not None, "what is planned holds its blocks"
            blocks = seq.lease.blocks[: -(-end // self._block_size)]
            sequences.append((seq.slice(chunk.start, end), chunk.start, blocks, chunk.samples))
        return ForwardBatch.build(sequences, self._block_size)

    def _row(self, seq: Sequence) -> Row:
        forbidden: frozenset[int] = frozenset()
        if len(seq.outputs) < seq.sampling.min_tokens:
            ends = self._stop_ids | seq.sampling.stop_token_ids
            forbidden = frozenset(token for token in ends if 0 <= token < self._vocab_size)
        return Row(seq.sampling, seq.seed, seq.request.tokens, seq.outputs, forbidden)
