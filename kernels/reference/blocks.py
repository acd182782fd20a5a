"""What happens to cached blocks: written, copied, gathered for another tier, scattered back, re-rotated.

`caches` is one pair (keys, values) a layer, each [num_blocks, block_size, Hkv, D].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.reference.layers import rope
from kernels.reference.quantize import E4M3_MAX

Caches = Sequence[tuple[Tensor, Tensor]]


def kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Scatter keys and values into their slots, divided by their head's scale (float[Hkv] each) if given."""
    scales = kv_scales or (None, None)
    for rows, cache, scale in zip((k, v), (k_cache, v_cache), scales, strict=True):
        if scale is not None:
            rows = rows / scale[:, None].to(rows)
        if cache.dtype == torch.float8_e4m3fn:
            # The conversion makes NaN of what is too large, and index assignment knows no float8.
            rows = rows.clamp(-E4M3_MAX, E4M3_MAX).to(cache.dtype).view(torch.uint8)
            cache = cache.view(torch.uint8)
        cache.flatten(0, 1)[slots] = rows


def rope_kv_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Rotate the queries and keys of qkv[T, Hq + 2 * Hkv, D], store keys and values; the queries."""
    kv_heads = k_cache.shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
    q, k = rope(qk, cos, sin).split((heads, kv_heads), dim=1)
    kv_write(k, v, k_cache, v_cache, slots, kv_scales=kv_scales)
    return q


def layers_of(caches: Caches) -> Caches:
    """Nothing to prepare: the caches as they came."""
    return caches


def block_copies(caches: Caches, copies: Sequence[tuple[int, int, int]]) -> None:
    """Copy the heads of blocks, (src, dst, num_tokens) each, one after another."""
    for src, dst, num_tokens in copies:
        for pair in caches:
            for cache in pair:
                cache[dst, :num_tokens] = cache[src, :num_tokens]


def block_gather(caches: Caches, blocks: Tensor) -> Tensor:
    """Whole blocks int64[n] of all layers: [n, L, 2, block_size, Hkv, D]."""
    return torch.stack([torch.stack([cache[blocks] for cache in pair], 1) for pair in caches], 1)


def block_scatter(caches: Caches, blocks: Tensor, staged: Tensor) -> None:
    """Put what `block_gather` gave into other blocks int64[n]."""
    for layer, pair in enumerate(caches):
        for half, cache in enumerate(pair):
            cache[blocks] = staged[:, layer, half]


def rope_shift(caches: Caches, blocks: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn the cached keys of blocks int64[n] on by an angle a block, whose cos and sin are [n, D // 2].

    Keys at position p become keys at p + delta, with the tables' rows for delta (sin negated for -delta).
    """
    for keys, _ in caches:
        chosen = keys[blocks]
        turned = rope(chosen.flatten(1, 2).to(cos.dtype), cos, sin)
        keys[blocks] = turned.view(chosen.shape).to(keys.dtype)
