"""What rank 0 tells the other ranks to do: a kind and arrays of integers, as two flat int64 tensors.

Headers are of one size, so that whoever receives one knows what to expect; it says how long the payload is.
All ranks, rank 0 too, carry an order out by the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from math import prod
from typing import Protocol

import numpy as np
from torch import Tensor

from replica.batch import ForwardBatch, IntArray

_FIELDS = tuple(field.name for field in fields(ForwardBatch))
_SHAPES = 3
HEADER_SIZE = _SHAPES + 2 * len(_FIELDS)
"""int64 numbers of a header: kind, drawn tokens that follow on the device (-1: none do), number of arrays,
rows and columns of each (columns -1: no matrix)."""


class Kind(IntEnum):
    """Which method of the model is meant."""

    ALLOCATE = 1
    COPY = 2
    FORWARD = 3
    RECORD = 4


class Worked(Protocol):
    """The model of one rank."""

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """See `Model.allocate_kv`."""

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """See `Model.copy_blocks`."""

    def forward(self, batch: ForwardBatch, drawn: Tensor | None) -> Tensor:
        """See `Model.forward`."""

    def record_decodes(self, most: int, longest: int) -> None:
        """See `Model.record_decodes`."""


@dataclass(frozen=True)
class Order:
    """One call of the model, the same on every rank.

    Attributes:
        arrays: each int64[n] or int64[n, m], on the host.
        drawn: int64[n] on the device, for `forward`, or None.
    """

    kind: Kind
    arrays: tuple[IntArray, ...]
    drawn: Tensor | None = None

    @classmethod
    def allocate(cls, num_blocks: int, block_size: int) -> Order:
        """Make room for KV blocks."""
        return cls(Kind.ALLOCATE, (np.array([num_blocks, block_size]),))

    @classmethod
    def record(cls, most: int, longest: int) -> Order:
        """Record decode steps."""
        return cls(Kind.RECORD, (np.array([most, longest]),))

    @classmethod
    def copy(cls, copies: Sequence[tuple[int, int, int]]) -> Order:
        """Copy the first n tokens of block src to block dst, for each (src, dst, n)."""
        return cls(Kind.COPY, (np.array(copies, dtype=np.int64).reshape(-1, 3),))

    @classmethod
    def forward(cls, batch: ForwardBatch, drawn: Tensor | None = None) -> Order:
        """Compute a batch."""
        return cls(Kind.FORWARD, tuple(getattr(batch, name) for name in _FIELDS), drawn)

    def carry_out(self, model: Worked) -> Tensor | None:
        """Call the model; logits for `forward`, else None."""
        if self.kind == Kind.FORWARD:
            return model.forward(ForwardBatch(*self.arrays), self.drawn)
        if self.kind == Kind.COPY:
            model.copy_blocks([(src, dst, tokens) for src, dst, tokens in self.arrays[0].tolist()])
        elif self.kind == Kind.RECORD:
            model.record_decodes(*self.arrays[0].tolist())
        else:
            model.allocate_kv(*self.arrays[0].tolist())
        return None

    def encode(self) -> tuple[IntArray, IntArray]:
        """Header int64[HEADER_SIZE] and payload int64[n]."""
        header = np.zeros(HEADER_SIZE, dtype=np.int64)
        header[:_SHAPES] = self.kind, -1 if self.drawn is None else len(self.drawn), len(self.arrays)
        for index, array in enumerate(self.arrays):
            at = _SHAPES + 2 * index
            header[at : at + 2] = len(array), array.shape[1] if array.ndim == 2 else -1
        return header, np.concatenate([array.ravel() for array in self.arrays]).astype(np.int64)

    @classmethod
    def decode(cls, header: IntArray, payload: IntArray, drawn: Tensor | None = None) -> Order:
        """The order that was encoded like this; `drawn` comes another way."""
        arrays, start = list[IntArray](), 0
        for shape in _shapes(header):
            end = start + prod(shape)
            arrays.append(payload[start:end].reshape(shape))
            start = end
        return cls(Kind(int(header[0])), tuple(arrays), drawn)


def payload_size(header: IntArray) -> int:
    """Numbers in the payload that follows a header."""
    return sum(prod(shape) for shape in _shapes(header))


def drawn_size(header: IntArray) -> int | None:
    """How many drawn tokens follow on the device; None when none do, which is not the same as 0 that do."""
    size = int(header[1])
    return None if size < 0 else size


def _shapes(header: IntArray) -> list[tuple[int, ...]]:
    pairs = header[_SHAPES : _SHAPES + 2 * int(header[2])].reshape(-1, 2).tolist()
    return [(rows,) if columns < 0 else (rows, columns) for rows, columns in pairs]
