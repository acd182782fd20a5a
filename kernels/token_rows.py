"""What a decoder layer does between products, one compiled call each: norm, rotary embedding, KV write.

In torch each takes two to six operators, which at few rows cost more in dispatch than in arithmetic.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from kernels.parallel import claim, floats, integers, worker


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x**2) + eps) * weight of each row of x[T, n] or, with any strides, x[T, H, n]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    out, epsilon = torch.empty(x.shape), torch.tensor([eps])
    _rms_norm(
        len(x),
        heads,
        x.shape[-1],
        x.data_ptr(),
        x.stride(0),
        head_stride,
        weight.data_ptr(),
        epsilon.data_ptr(),
        out.data_ptr(),
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x[T, n] + residual[T, n], and that sum."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope_kv_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> Tensor:
    """Turn the pairs (i, i + D / 2) of queries and keys in place, copy keys and values to slots int64[T].

    Each token of qkv[T, Hq + 2 * Hkv, D] is contiguous. Returns the queries, a view.
    """
    tokens, all_heads, dim = qkv.shape
    kv_heads, row, start = k_cache.shape[2], qkv.stride(0), qkv.data_ptr()
    heads, size = all_heads - 2 * kv_heads, kv_heads * dim
    cos, sin = cos.contiguous(), sin.contiguous()
    _rope(tokens, heads + kv_heads, dim // 2, start, row, dim, cos.data_ptr(), sin.data_ptr())
    # Addresses instead of slices, which would take longer than the copy.
    keys = start + heads * dim * qkv.element_size()
    values = keys + size * qkv.element_size()
    _kv_write(tokens, size, slots.data_ptr(), keys, row, k_cache.data_ptr(), values, row, v_cache.data_ptr())
    return qkv[:, :heads]


@numba.njit(fastmath={"contract", "reassoc", "nsz"})
def _squares(x: Any, start: int, size: int) -> Any:
    total = np.float32(0)
    for i in range(start, start + size):
        total += x[i] * x[i]
    return total


@worker
def _rms_norm(args: Any) -> None:
    heads, size = args[2], args[3]
    x, stride, head_stride = floats(args[4]), args[5], args[6]
    weight, eps, out = floats(args[7]), floats(args[8])[0], floats(args[9])
    row = claim(args)
    while row < args[1]:
        for head in range(heads):
            start, target = row * stride + head * head_stride, (row * heads + head) * size
            mean = _squares(x, start, size) / np.float32(size)
            factor = np.float32(1) / np.float32(math.sqrt(mean + eps))
            for i in range(size):
                out[target + i] = x[start + i] * factor * weight[i]
        row = claim(args)


@worker
def _rope(args: Any) -> None:
    heads, half = args[2], args[3]
    x, stride, head_stride = floats(args[4]), args[5], args[6]
    cos, sin = floats(args[7]), floats(args[8])
    row = claim(args)
    while row < args[1]:
        for head in range(heads):
            start = row * stride + head * head_stride
            for i in range(half):
                first, second = x[start + i], x[start + half + i]
                c, s = cos[row * half + i], sin[row * half + i]
                x[start + i] = first * c - second * s
                x[start + half + i] = second * c + first * s
        row = claim(args)


@worker
def _kv_write(args: Any) -> None:
    size, slots = args[2], integers(args[3])
    k, k_stride, k_cache = floats(args[4]), args[5], floats(args[6])
    v, v_stride, v_cache = floats(args[7]), args[8], floats(args[9])
    row = claim(args)
    while row < args[1]:
        target = slots[row] * size
        for i in range(size):
            k_cache[target + i] = k[row * k_stride + i]
            v_cache[target + i] = v[row * v_stride + i]
        row = claim(args)
