"""What a decoder layer does to each token's row by itself: products, norms, rotation, activation."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.grouped import Weight, dense
from kernels.ops import Linear


def pack_linear(weight: Weight, bias: Tensor | None) -> Linear:
    """x @ weight.T + bias."""
    plain = dense(weight)

    def apply(x: Tensor) -> Tensor:
        y = x @ plain.T
        return y if bias is None else y + bias

    return apply


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm (Zhang and Sennrich 2019)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum: the next residual."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021), the "halves" pairing of Hugging Face: (i, i + D/2) is one pair."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's elementwise part (Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
