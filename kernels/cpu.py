"""The fast path for float32 on a CPU, in torch.

What it does differently from `reference`, measured on SmolLM2-135M with one thread of an AVX-512 Xeon:

- Linear layers use MKL's packed GEMM where torch has it: as fast as a GEMV at 1 row, 1.7 to 2.3 times as
fast as
  `F.linear` at 8 rows, 1.1 times at 512. One row's result does not depend on the other rows, bit for bit
  (plain `F.linear` changes its order of summation with the number of rows), so neighbours in a batch change
  nothing.
- Attention reads a sequence whose blocks lie in a row as a view; only scattered blocks are gathered.
- Grouped query heads are folded into the query length (decode) or a broadcast dimension (prefill): keys and
  values are never repeated in memory.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Linear, PagedSeqs
from kernels.reference import block_copy

__all__ = [
    "block_copy",
    "kv_write",
    "pack_linear",
    "paged_decode",
    "paged_prefill",
    "plan",
    "rms_norm",
    "rope",
    "silu_mul",
]

log = logging.getLogger(__name__)

# MKL packs for a number of rows but accepts any; packed for many rows it is best for few as well.
_PACK_ROWS = 512
# Row counts a packed matrix is tried with before it is trusted.
_PROBE_ROWS = (1, 5, 33)


def pack_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """x @ weight.T + bias with the weight packed once; `weight` itself is not kept."""
    if torch.backends.mkl.is_available():
        packed = _mkl_linear(weight, bias)
        if _agrees(packed, weight, bias):
            return packed
        log.warning("MKL's packed GEMM failed its self-check on this CPU; falling back to oneDNN")
    if torch.backends.mkldnn.is_available():
        return _onednn_linear(weight, bias)
    return lambda x: F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in place."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(turned)
    return x


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Scatter keys and values into their slots."""
    k_cache.flatten(0, 1).index_copy_(0, slots, k)
    v_cache.flatten(0, 1).index_copy_(0, slots, v)


@dataclass(frozen=True)
class _Seq:
    """Where a sequence's visible keys lie: slots [start, start + length) of the cache or of its blocks."""

    new: int
    start: int
    length: int
    blocks: Tensor | None
    mask: Tensor | None

    def read(self, cache: Tensor) -> Tensor:
        """[1, Hkv, length, D] by one stride trick instead of four views: it runs per sequence and layer."""
        if self.blocks is not None:
            cache = cache.index_select(0, self.blocks)
        heads, dim = cache.shape[2:]
        size, stride = (1, heads, self.length, dim), (0, dim, heads * dim, 1)
        return cache.as_strided(size, stride, cache.storage_offset() + self.start * heads * dim)


def plan(seqs: PagedSeqs, window: int | None) -> list[_Seq]:
    """Find views, gather lists and masks; they are the same in every layer."""
    rows = zip(seqs.query_lens, seqs.context_lens, seqs.block_tables, strict=True)
    return [_plan_one(new, context, table, seqs.block_size, window) for new, context, table in rows]


def paged_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: list[_Seq], scale: float) -> Tensor:
    """One call of torch's fused attention per sequence, with the group of query heads as the query length."""
    heads, kv_heads = q.shape[1], k_cache.shape[2]
    grouped = q.reshape(len(plan), 1, kv_heads, heads // kv_heads, -1)
    parts = [
        F.scaled_dot_product_attention(grouped[i], seq.read(k_cache), seq.read(v_cache), scale=scale)
        for i, seq in enumerate(plan)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(q.shape)


def paged_prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: list[_Seq], scale: float) -> Tensor:
    """One call per sequence, with KV heads as the batch and their query heads as broadcast heads."""
    kv_heads, dim = k_cache.shape[2:]
    group, row = q.shape[1] // kv_heads, 0
    out = torch.empty(q.shape, dtype=q.dtype)
    for seq in plan:
        mine = q[row : row + seq.new].view(seq.new, kv_heads, group, dim).permute(1, 2, 0, 3)
        shape = (kv_heads, group, seq.length, dim)
        keys = seq.read(k_cache).transpose(0, 1).expand(shape)
        values = seq.read(v_cache).transpose(0, 1).expand(shape)
        done = F.scaled_dot_product_attention(
            mine, keys, values, attn_mask=seq.mask, is_causal=seq.mask is None and seq.new > 1, scale=scale
        )
        out[row : row + seq.new].view(seq.new, kv_heads, group, dim).copy_(done.permute(2, 0, 1, 3))
        row += seq.new
    return out


def _plan_one(new: int, context: int, table: Tensor, block_size: int, window: int | None) -> _Seq:
    # The oldest new token sees `window` tokens, itself included.
    first = 0 if window is None else max(0, context - new + 1 - window)
    first_block, end_block = first // block_size, -(-context // block_size)
    blocks = table[first_block:end_block]
    offset, length = first % block_size, context - first
    consecutive = bool((blocks.diff() == 1).all())
    start = offset + int(blocks[0]) * block_size if consecutive else offset
    mask = _mask(new, length, window) if new > 1 and (length > new or window is not None) else None
    return _Seq(new, start, length, None if consecutive else blocks, mask)


def _mask(new: int, length: int, window: int | None) -> Tensor:
    """[new, length], 0 where a query sees a key and -inf elsewhere."""
    query = torch.arange(length - new, length)[:, None]
    key = torch.arange(length)[None]
    hidden = key > query if window is None else (key > query) | (key <= query - window)
    return torch.zeros(new, length).masked_fill_(hidden, float("-inf"))


def _mkl_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
    # The operator asks for the plain weight too, but reads only its shape: one element, stretched, will do.
    shape_only = weight.new_empty(1).expand(weight.shape)
    run = torch.ops.mkl._mkl_linear.default

    def apply(x: Tensor) -> Tensor:
        # Saying that it was packed for len(x) rows keeps the operator from falling back to the plain weight.
        return run(x, packed, shape_only, bias, len(x))

    return apply


def _onednn_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
    run = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: run(x, packed, bias, "none", [], "")


def _agrees(packed: Linear, weight: Tensor, bias: Tensor | None) -> bool:
    """Packed and plain results are equal up to rounding, for few and for many rows."""
    columns = torch.arange(weight.shape[1], dtype=weight.dtype)
    for rows in _PROBE_ROWS:
        x = torch.cos(columns * torch.arange(1, rows + 1, dtype=weight.dtype)[:, None])
        expected = F.linear(x, weight, bias)
        if not torch.allclose(
            packed(x), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()) + 1e-30
        ):
            return False
    return True
