"""Attention of one new token per sequence, reading keys and values where they lie in the paged cache.

An item of work is one sequence and one KV head with its group of query heads: two passes over the context,
one for the scores and one for the weighted values. Nothing in it depends on the other sequences.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from kernels.parallel import claim, floats, integers, worker


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, contexts: Tensor, window: int, scale: float
) -> Tensor:
    """out[S, Hq, D] for q[S, Hq, D], caches [num_blocks, block_size, Hkv, D], all float32.

    Args:
        tables: int64[S, max_blocks], contiguous.
        contexts: int64[S], tokens in the cache, the new one included.
        window: how many of them, at the end, are seen.
        scale: multiplies the scores.
    """
    count, heads, dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(count, heads, dim)
    scales = torch.tensor([scale])
    _attend(
        count * kv_heads,
        kv_heads,
        heads // kv_heads,
        dim,
        block_size,
        window,
        tables.data_ptr(),
        tables.stride(0),
        contexts.data_ptr(),
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        out.data_ptr(),
        scales.data_ptr(),
    )
    return out


@numba.njit(fastmath={"contract", "reassoc", "nsz"})
def _dot(a: Any, a_at: int, b: Any, b_at: int, length: int) -> Any:
    total = np.float32(0)
    for i in range(length):
        total += a[a_at + i] * b[b_at + i]
    return total


@numba.njit(fastmath={"contract"})
def _add_scaled(factor: Any, a: Any, a_at: int, into: Any, into_at: int, length: int) -> None:
    for i in range(length):
        into[into_at + i] += factor * a[a_at + i]


@numba.njit(error_model="numpy")
def _softmax(scores: Any, begin: int, end: int) -> None:
    """Scores to weights that add up to 1, in place."""
    highest = scores[begin]
    for i in range(begin, end):
        highest = max(highest, scores[i])
    total = np.float32(0)
    for i in range(begin, end):
        scores[i] = math.exp(scores[i] - highest)
        total += scores[i]
    for i in range(begin, end):
        scores[i] /= total


@worker
def _attend(args: Any) -> None:
    kv_heads, group, dim, block_size, window = args[2], args[3], args[4], args[5], args[6]
    tables, table_stride, contexts = integers(args[7]), args[8], integers(args[9])
    q, q_stride, head_stride = floats(args[10]), args[11], args[12]
    keys, values, out, scale = floats(args[13]), floats(args[14]), floats(args[15]), floats(args[16])[0]
    sums_memory = np.empty(group * dim, np.float32)
    sums = floats(sums_memory.ctypes.data)
    item = claim(args)
    while item < args[1]:
        seq, kv_head = item // kv_heads, item % kv_heads
        context = contexts[seq]
        first = max(0, context - window)
        seen = context - first
        scores_memory = np.empty(group * seen, np.float32)
        scores = floats(scores_memory.ctypes.data)
        blocks = range(first // block_size, (context - 1) // block_size + 1)
        for block in blocks:
            start = (tables[seq * table_stride + block] - block) * block_size
            for token in range(max(first, block * block_size), min(context, (block + 1) * block_size)):
                place = ((start + token) * kv_heads + kv_head) * dim
                for head in range(group):
                    mine = seq * q_stride + (kv_head * group + head) * head_stride
                    scores[head * seen + token - first] = _dot(q, mine, keys, place, dim) * scale
        for i in range(group * dim):
            sums[i] = 0
        for head in range(group):
            _softmax(scores, head * seen, (head + 1) * seen)
        for block in blocks:
            start = (tables[seq * table_stride + block] - block) * block_size
            for token in range(max(first, block * block_size), min(context, (block + 1) * block_size)):
                place = ((start + token) * kv_heads + kv_head) * dim
                for head in range(group):
                    _add_scaled(scores[head * seen + token - first], values, place, sums, head * dim, dim)
        for i in range(group * dim):
            out[item * group * dim + i] = sums[i]
        scores_memory[0] = 0  # numba frees an array after its last use
        item = claim(args)
    sums_memory[0] = 0
