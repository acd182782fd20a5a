"""Cached blocks in 8 bits, for slower tiers: float8 (e4m3) or int8, a scale a block, cache and head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

E4M3_MAX, INT8_MAX = 448.0, 127.0


def kv_quantize(
    caches: Sequence[tuple[Tensor, Tensor]], blocks: Tensor, lengths: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The first lengths[i] tokens of blocks[i], both int64[n], in 8 bits.

    Returns codes [n, L, 2, block_size, Hkv, D] of `dtype` (torch.int8 or torch.float8_e4m3fn), 0 past the
    lengths, and scales float[n, L, 2, Hkv]: cached value = code * scale. A scale is the largest magnitude of
    its part over the largest of the format; 1 where all is 0.
    """
    limit = INT8_MAX if dtype == torch.int8 else E4M3_MAX
    rows = torch.stack([torch.stack([cache[blocks] for cache in pair], 1) for pair in caches], 1)
    valid = torch.arange(rows.shape[3], device=rows.device) < lengths.to(rows.device)[:, None]
    rows = rows.masked_fill(~valid[:, None, None, :, None, None], 0)
    scales = rows.abs().amax((3, 5)) / limit
    scales = torch.where(scales == 0, 1, scales)
    ratio = (rows / scales[:, :, :, None, :, None]).clamp(-limit, limit)
    return (ratio.round() if dtype == torch.int8 else ratio).to(dtype), scales


def kv_dequantize(
    caches: Sequence[tuple[Tensor, Tensor]], blocks: Tensor, codes: Tensor, scales: Tensor
) -> None:
    """Put what `kv_quantize` gave back into blocks int64[n] of the caches."""
    for layer, pair in enumerate(caches):
        for half, cache in enumerate(pair):
            part = codes[:, layer, half].to(scales.dtype) * scales[:, layer, half, None, :, None]
            cache[blocks] = part.to(cache.dtype)
