"""Root-mean-square norm, alone or of a sum with the residual, which it then writes too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])  # they vary from step to step, see `paged_decode`
def rms_norm_kernel(
    x, residual, weight, out, total, rows, inner, stride_outer, stride_inner, width, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program; row r of x is at (r // inner, r % inner), rows of all else are adjacent."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    live = (row < rows)[:, None] & (column < width)[None, :]
    x_at = (row // inner).to(tl.int64) * stride_outer + (row % inner) * stride_inner
    flat = row.to(tl.int64)[:, None] * width + column[None, :]
    values = tl.load(x + x_at[:, None] + column[None, :], mask=live, other=0).to(tl.float32)
    if ADD:
        values += tl.load(residual + flat, mask=live, other=0).to(tl.float32)
        tl.store(total + flat, values.to(total.dtype.element_ty), mask=live)
    inverse = tl.rsqrt(tl.sum(values * values, 1) / width + eps)
    factor = tl.load(weight + column, mask=column < width, other=0).to(tl.float32)
    tl.store(out + flat, (values * inverse[:, None] * factor[None, :]).to(out.dtype.element_ty), mask=live)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x[..., n] / sqrt(mean(x**2) + eps) * weight[n]; x may be a slice of something wider."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1]), None, weight, out, None, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x[T, n] + residual[T, n], and that sum; the norm is of the sum before it is rounded."""
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x[:, None], residual.contiguous(), weight, out, total, eps)
    return out, total


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None, eps: float
) -> None:
    """x[A, B, n] with any strides but the last."""
    outer, inner, width = x.shape
    if outer * inner == 0:
        return
    x = x if x.stride(2) == 1 else x.contiguous()
    padded = triton.next_power_of_2(width)
    rows = max(1, 1024 // padded)
    rms_norm_kernel[(triton.cdiv(outer * inner, rows),)](
        x, x if residual is None else residual, weight, out, out if total is None else total,
        outer * inner, inner, x.stride(0), x.stride(1), width, eps,
        ADD=residual is not None, ROWS=rows, PADDED=padded, num_warps=8 if padded > 2048 else 4,
    )  # fmt: skip
