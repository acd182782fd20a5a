"""Cached blocks to 8 bits and back, for slower tiers: all layers by one launch.

A block takes half of its 16-bit size, and 4 bytes a head, layer and half for the scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference import E4M3_MAX, INT8_MAX
from kernels.triton import configs
from kernels.triton.float8 import from_e4m3, to_e4m3
from kernels.triton.layers import Layers
from kernels.triton.rope_shift import TYPES

ROWS = 16  # tokens a program takes at a time


@triton.jit
def quantize_kernel(
    bases, blocks, lengths, codes, scales, stride, heads,
    TYPE: tl.constexpr, ALIGN: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, LIMIT: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Program (block, cache, head): the block is read twice, for its largest magnitude and to be written."""
    place, cache, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tl.multiple_of(tl.load(bases + cache).to(tl.pointer_type(TYPE)), ALIGN)
    rows += tl.load(blocks + place) * stride + head * DIM
    length = tl.load(lengths + place)
    column = tl.arange(0, PADDED)
    narrow = (column < DIM)[None, :]
    top = 0.0
    for first in range(0, PAGE, ROWS):
        token = first + tl.arange(0, ROWS)
        at = (token * heads * DIM)[:, None] + column[None, :]
        values = tl.load(rows + at, mask=(token < length)[:, None] & narrow, other=0).to(tl.float32)
        top = tl.maximum(top, tl.max(tl.max(tl.abs(values), 1), 0))
    scale = tl.where(top == 0.0, 1.0, tl.div_rn(top, LIMIT))
    part = place.to(tl.int64) * tl.num_programs(1) + cache
    tl.store(scales + part * heads + head, scale)
    for first in range(0, PAGE, ROWS):
        token = first + tl.arange(0, ROWS)
        at = (token * heads * DIM)[:, None] + column[None, :]
        values = tl.load(rows + at, mask=(token < length)[:, None] & narrow, other=0).to(tl.float32)
        ratio = tl.div_rn(values, scale)
        out = codes + (part * PAGE * heads + head) * DIM + at
        live = (token < PAGE)[:, None] & narrow
        if FLOAT8:
            tl.store(out, to_e4m3(ratio), mask=live)
        else:
            # Numbers of this size have steps of 1: adding it rounds, to even where that is a tie.
            tl.store(out, ((ratio + 12582912.0) - 12582912.0).to(tl.int8), mask=live)


@triton.jit
def dequantize_kernel(
    bases, blocks, codes, scales, stride, heads,
    TYPE: tl.constexpr, ALIGN: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, FLOAT8: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Program (block, cache, head): code times scale into the cache."""
    place, cache, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tl.multiple_of(tl.load(bases + cache).to(tl.pointer_type(TYPE)), ALIGN)
    rows += tl.load(blocks + place) * stride + head * DIM
    part = place.to(tl.int64) * tl.num_programs(1) + cache
    scale = tl.load(scales + part * heads + head)
    column = tl.arange(0, PADDED)
    for first in range(0, PAGE, ROWS):
        token = first + tl.arange(0, ROWS)
        at = (token * heads * DIM)[:, None] + column[None, :]
        live = (token < PAGE)[:, None] & (column < DIM)[None, :]
        code = tl.load(codes + (part * PAGE * heads + head) * DIM + at, mask=live, other=0)
        values = from_e4m3(code, NATIVE).to(tl.float32) if FLOAT8 else code.to(tl.float32)
        tl.store(rows + at, (values * scale).to(TYPE), mask=live)


def kv_quantize(layers: Layers, blocks: Tensor, lengths: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.kv_quantize`, scales in float32; `dtype` is torch.int8 or torch.float8_e4m3fn."""
    page, heads, dim = layers.shape
    parts = (len(blocks), layers.num_layers, 2)
    codes = torch.empty((*parts, page, heads, dim), dtype=dtype, device=blocks.device)
    scales = torch.empty((*parts, heads), dtype=torch.float32, device=blocks.device)
    float8 = dtype == torch.float8_e4m3fn
    if len(blocks):
        quantize_kernel[(len(blocks), 2 * layers.num_layers, heads)](
            layers.bases, blocks, lengths, codes.view(torch.uint8) if float8 else codes, scales,
            layers.stride // layers.dtype.itemsize, heads, TYPE=TYPES[layers.dtype], ALIGN=layers.align,
            PAGE=page, DIM=dim, PADDED=triton.next_power_of_2(dim), ROWS=ROWS,
            LIMIT=E4M3_MAX if float8 else INT8_MAX, FLOAT8=float8, num_warps=4,
        )  # fmt: skip
    return codes, scales


def kv_dequantize(layers: Layers, blocks: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Put what `kv_quantize` gave back into blocks int64[n] of the caches."""
    page, heads, dim = layers.shape
    float8 = codes.dtype == torch.float8_e4m3fn
    if len(blocks):
        dequantize_kernel[(len(blocks), 2 * layers.num_layers, heads)](
            layers.bases, blocks, codes.view(torch.uint8) if float8 else codes, scales,
            layers.stride // layers.dtype.itemsize, heads, TYPE=TYPES[layers.dtype], ALIGN=layers.align,
            PAGE=page, DIM=dim, PADDED=triton.next_power_of_2(dim), ROWS=ROWS, FLOAT8=float8,
            NATIVE=configs.converts_float8(blocks.device), num_warps=4,
        )  # fmt: skip
