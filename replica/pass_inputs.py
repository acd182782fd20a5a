"""What all layers of one forward pass share, brought to the device: from a `ForwardBatch` to a `Pass`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AttentionShape, Kernels, PagedSeqs
from replica.batch import ForwardBatch, IntArray
from replica.staging import Staging

Plans = dict[int | None, Any]


@dataclass(frozen=True)
class Pass:
    """T tokens on the device; the first `decodes` are sequences of one new token.

    Attributes:
        ids, positions, slots: int64[T].
        rows: int64[R], the rows whose logits are wanted; None for all, as they are.
        decodes: how many of the tokens are decodes.
        decode_plans, prefill_plans: of attention, by sliding window; empty where there is nothing of a kind.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor | None
    decodes: int
    decode_plans: Plans
    prefill_plans: Plans


class PassInputs:
    """Makes passes for one model on one device.

    Args:
        windows: the sliding windows of the model's layers.
        shape: of its attention.
    """

    def __init__(
        self, kernels: Kernels, windows: Iterable[int | None], shape: AttentionShape, block_size: int
    ) -> None:
        self.staging = Staging(shape.device)
        self.block_size = block_size
        self._kernels = kernels
        self._windows = tuple(windows)
        self._shape = shape

    def build(self, batch: ForwardBatch, drawn: Tensor | None) -> Pass:
        """A pass of a batch with decodes first; `drawn` as in `Model.forward`."""
        decodes = int((batch.query_lens == 1).sum())
        parts = [self._seqs(batch, slice(0, decodes)), self._seqs(batch, slice(decodes, None))]
        first, second = (self._kernels.plan_arrays(seqs, self._shape) for seqs in parts)
        whole = np.array_equal(batch.logit_rows, np.arange(batch.num_tokens))
        ints = [wide(array) for array in (batch.token_ids, batch.positions, batch.slots, batch.logit_rows)]
        ids, positions, slots, rows, *rest = self.staging.put([*ints, *first, *second])
        return Pass(
            ids=resolved(ids, batch, drawn),
            positions=positions,
            slots=slots,
            rows=None if whole else rows,
            decodes=decodes,
            decode_plans=self.plans(parts[0], rest[: len(first)]),
            prefill_plans=self.plans(parts[1], rest[len(first) :]),
        )

    def plans(self, seqs: PagedSeqs, arrays: Sequence[Tensor]) -> Plans:
        """One plan for each sliding window; none for no sequences."""
        if not seqs.query_lens:
            return {}
        return {window: self._kernels.plan(seqs, window, arrays) for window in self._windows}

    def _seqs(self, batch: ForwardBatch, part: slice) -> PagedSeqs:
        return PagedSeqs(
            query_lens=tuple(batch.query_lens[part].tolist()),
            context_lens=tuple(batch.context_lens[part].tolist()),
            block_tables=torch.from_numpy(wide(batch.block_tables[part])),
            block_size=self.block_size,
        )


def wide(values: IntArray) -> IntArray:
    """int64, contiguous."""
    return np.ascontiguousarray(values, dtype=np.int64)


def resolved(ids: Tensor, batch: ForwardBatch, drawn: Tensor | None) -> Tensor:
    """Token ids, with what was drawn in a row in place of -1 - row; 0 where nothing could be drawn."""
    if drawn is None or not (batch.token_ids < 0).any():
        return ids
    rows = (-1 - ids).clamp(min=0)
    return torch.where(ids < 0, drawn[rows].clamp(min=0), ids)
