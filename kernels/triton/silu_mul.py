"""SwiGLU's elementwise part."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


@triton.jit
def silu_mul_kernel(gate_up, out, stride_row, width, TILE: tl.constexpr):
    """Program (row, tile): out[T, width] from gate_up[T, 2 * width]."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = column < width
    gate = tl.load(gate_up + row * stride_row + column, mask=live, other=0).to(tl.float32)
    up = tl.load(gate_up + row * stride_row + width + column, mask=live, other=0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=live)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up[T, 2 * n] = (gate, up)."""
    width = gate_up.shape[1] // 2
    out = torch.empty((len(gate_up), width), dtype=gate_up.dtype, device=gate_up.device)
    if len(gate_up):
        grid = (len(gate_up), triton.cdiv(width, TILE))
        silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), width, TILE=TILE, num_warps=4)
    return out
