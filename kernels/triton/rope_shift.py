"""Cached keys turned on to other positions, in place and in all layers by one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.layers import Layers

ROWS = 16  # (token, head) pairs a program turns
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def rope_shift_kernel(
    bases, blocks, cos, sin, stride, rows,
    TYPE: tl.constexpr, ALIGN: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (block, layer, tile) of a block's (token, head) rows; `stride` in elements."""
    place, layer = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    narrow = column < HALF
    live = (row < rows)[:, None] & narrow[None, :]
    keys = tl.multiple_of(tl.load(bases + 2 * layer).to(tl.pointer_type(TYPE)), ALIGN)
    at = keys + tl.load(blocks + place) * stride + (row * 2 * HALF)[:, None] + column[None, :]
    first = tl.load(at, mask=live, other=0).to(tl.float32)
    second = tl.load(at + HALF, mask=live, other=0).to(tl.float32)
    c = tl.load(cos + place * HALF + column, mask=narrow, other=0)[None, :]
    s = tl.load(sin + place * HALF + column, mask=narrow, other=0)[None, :]
    tl.store(at, (first * c - second * s).to(TYPE), mask=live)
    tl.store(at + HALF, (second * c + first * s).to(TYPE), mask=live)


def rope_shift(layers: Layers, blocks: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn the keys of distinct blocks int64[n] by an angle a block: its cos, sin as float32[n, D // 2].

    The result is rounded to the cache's dtype again: keep a block's first rotation where it will be shifted
    often. Raises `ValueError` for float8 caches, which are too coarse for that.
    """
    if layers.dtype not in TYPES:
        raise ValueError(f"cached keys of {layers.dtype} are not re-rotated")
    page, heads, dim = layers.shape
    if len(blocks):
        rope_shift_kernel[(len(blocks), layers.num_layers, triton.cdiv(page * heads, ROWS))](
            layers.bases, blocks, cos.float().contiguous(), sin.float().contiguous(),
            layers.stride // layers.dtype.itemsize, page * heads,
            TYPE=TYPES[layers.dtype], ALIGN=layers.align, HALF=dim // 2,
            PADDED=triton.next_power_of_2(dim // 2), ROWS=ROWS, num_warps=4,
        )  # fmt: skip
