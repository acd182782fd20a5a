"""What attention needs to know once per forward pass, made on the host and kept on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AttentionShape, IntArray, PagedSeqs
from kernels.triton import configs

STATIC_PLANS = True


@dataclass(frozen=True)
class DeviceSeqs:
    """The sequences as int32 tensors of one device.

    Attributes:
        tables: [S, max_blocks].
        starts: [S + 1], row of each sequence's first new token, then their number.
        contexts: [S], cached prefix plus new tokens.
    """

    tables: Tensor
    starts: Tensor
    contexts: Tensor


@dataclass(frozen=True)
class Plan:
    """Sequences and window; device tensors are given, or made when first asked for, and serve all layers.

    Attributes:
        seqs: of the host. Where device tensors are given, only `longest` is taken from them.
        window: cached tokens that a new one sees, itself included; None for all.
        given_tiles: tiles of the prefill kernel that `configs` has for these sequences.
    """

    seqs: PagedSeqs
    window: int | None
    given_tiles: Tensor | None = None
    _made: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def on(self, device: torch.device) -> DeviceSeqs:
        """The sequences on a device."""
        if device not in self._made:
            tensors = map(torch.from_numpy, _seq_arrays(self.seqs))
            self._made[device] = DeviceSeqs(*(tensor.to(device) for tensor in tensors))
        return self._made[device]

    def tiles(self, device: torch.device, rows: int, group: int) -> Tensor:
        """int32[n, 2]: (sequence, first row) of prefill tiles of so many (token, query head) rows."""
        key = (device, rows, group)
        if key not in self._made:
            self._made[key] = torch.from_numpy(tile_array(self.seqs, rows, group)).to(device)
        return self._made[key]

    @property
    def longest(self) -> int:
        """Most cached tokens that a new token sees in any sequence."""
        seen = max(self.seqs.context_lens, default=0)
        return seen if self.window is None else min(seen, self.window)


def plan_arrays(seqs: PagedSeqs, shape: AttentionShape) -> tuple[IntArray, ...]:
    """int32 block tables, starts and contexts; tiles too, if a sequence has more than one new token."""
    arrays = _seq_arrays(seqs)
    if max(seqs.query_lens, default=0) <= 1:
        return arrays
    gpu = configs.gpu_class(shape.device)
    tile = configs.prefill_tile(gpu, configs.padded(shape.dim), shape.dtype)
    return (*arrays, tile_array(seqs, tile.rows, shape.group))


def plan(seqs: PagedSeqs, window: int | None, arrays: Sequence[Tensor] = ()) -> Plan:
    """Keep the arguments; what is not given follows when the device is known."""
    if not arrays:
        return Plan(seqs, window)
    tables, starts, contexts, *tiles = arrays
    made = {tables.device: DeviceSeqs(tables, starts, contexts)}
    return Plan(seqs, window, tiles[0] if tiles else None, made)


def tile_array(seqs: PagedSeqs, rows: int, group: int) -> IntArray:
    """int32[n, 2] of `Plan.tiles`. The longest come first, so that none is left running alone at the end."""
    pairs = [
        (context - new + first // group, seq, first)
        for seq, (new, context) in enumerate(zip(seqs.query_lens, seqs.context_lens, strict=True))
        for first in range(0, new * group, rows)
    ]
    return np.array([pair[1:] for pair in sorted(pairs, reverse=True)], dtype=np.int32).reshape(-1, 2)


def _seq_arrays(seqs: PagedSeqs) -> tuple[IntArray, IntArray, IntArray]:
    tables = seqs.block_tables.numpy().astype(np.int32)
    starts = np.concatenate(([0], np.cumsum(seqs.query_lens))).astype(np.int32)
    return tables, starts, np.array(seqs.context_lens, dtype=np.int32)


def cache_bytes(cache: Tensor) -> Tensor:
    """A float8 cache as uint8, any other as it is."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def scale_pointers(kv_scales: tuple[Tensor, Tensor] | None, stand_in: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of a float8 cache, or any two tensors of the device where there are none."""
    return (stand_in, stand_in) if kv_scales is None else kv_scales
