"""float32 on a CPU with torch alone: what `cpu` builds on, and what stands in where that cannot run.

What it does differently from `reference`, measured on SmolLM2-135M with one thread of an AVX-512 Xeon:

- Linear layers use MKL's packed GEMM where torch has it: as fast as a GEMV at 1 row, 1.7 to 2.3 times as fast
  as `F.linear` at 8 rows, 1.1 times at 512. One row's result does not depend on the other rows, bit for bit
  (plain `F.linear` sums in an order that depends on the number of rows): neighbours in a batch are harmless.
- Attention reads runs of adjacent blocks in place and joins the partial results by their log-sum-exp; only
  badly scattered blocks are gathered first. 1,500 tokens in 2 runs: 0.18 ms a layer instead of 0.33.
- Grouped query heads are folded into the query length (decode) or a broadcast dimension (prefill): keys and
  values are never repeated in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grouped import Weight, dense
from kernels.ops import Linear, PagedSeqs
from kernels.reference import STATIC_PLANS, block_copies, layers_of, plan_arrays

__all__ = [
    "STATIC_PLANS",
    "add_rms_norm",
    "block_copies",
    "layers_of",
    "pack_linear",
    "paged_decode",
    "paged_prefill",
    "plan",
    "plan_arrays",
    "rms_norm",
    "rope_kv_write",
    "silu_mul",
]

log = logging.getLogger(__name__)

# MKL packs for a number of rows but accepts any; packed for many rows it is best for few as well.
_PACK_ROWS = 512
# Row counts a packed matrix is tried with before it is trusted.
_PROBE_ROWS = (1, 5, 33)

# One more piece of attention costs about 20 us, gathering about 0.1 us a token.
_TOKENS_PER_EXTRA_PIECE = 200


def pack_linear(weight: Weight, bias: Tensor | None) -> Linear:
    """x @ weight.T + bias with the weight packed once; `weight` itself is not kept."""
    weight = dense(weight)
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


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of a sum, and the sum."""
    total = x + residual
    return rms_norm(total, weight, eps), total


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


def rope_kv_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> Tensor:
    """Rotary embedding of queries and keys in place, keys and values to their slots; the queries."""
    kv_heads = k_cache.shape[2]
    turned = rope(qkv[:, :-kv_heads], cos, sin)
    kv_write(turned[:, -kv_heads:], qkv[:, -kv_heads:], k_cache, v_cache, slots)
    return turned[:, :-kv_heads]


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Scatter keys and values into their slots."""
    k_cache.flatten(0, 1).index_copy_(0, slots, k)
    v_cache.flatten(0, 1).index_copy_(0, slots, v)


@dataclass(frozen=True)
class _Piece:
    """Adjacent slots [start, start + length) that a query attends to, all of them or causally."""

    start: int
    length: int
    causal: bool = False


@dataclass(frozen=True)
class SeqPieces:
    """Where a sequence's visible keys lie: pieces of the cache, or of its blocks gathered in order."""

    new: int
    blocks: Tensor | None
    pieces: tuple[_Piece, ...]
    mask: Tensor | None = None

    def rows(self, cache: Tensor) -> Tensor:
        """The memory that the pieces are cut from."""
        return cache if self.blocks is None else cache.index_select(0, self.blocks)


def plan(seqs: PagedSeqs, window: int | None, arrays: Sequence[Tensor] = ()) -> list[SeqPieces]:
    """Find pieces, gather lists and masks; they are the same in every layer."""
    rows = zip(seqs.query_lens, seqs.context_lens, seqs.block_tables, strict=True)
    if window is None:
        return [_plan_full(new, context, table, seqs.block_size) for new, context, table in rows]
    return [_plan_window(new, context, table, seqs.block_size, window) for new, context, table in rows]


def paged_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: list[SeqPieces], scale: float) -> Tensor:
    """torch's fused attention, sequence by sequence, with a group of query heads as the query length."""
    heads, (kv_heads, dim) = q.shape[1], k_cache.shape[2:]
    grouped = q.reshape(len(plan), 1, kv_heads, heads // kv_heads, dim)
    parts = [
        _attend(grouped[i], seq.rows(k_cache), seq.rows(v_cache), seq, (1, kv_heads), (0, dim), scale)
        for i, seq in enumerate(plan)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(q.shape)


def paged_prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: list[SeqPieces], scale: float) -> Tensor:
    """The same with KV heads as the batch and their query heads as heads that share one copy of the keys."""
    kv_heads, dim = k_cache.shape[2:]
    group, row = q.shape[1] // kv_heads, 0
    out = torch.empty(q.shape, dtype=q.dtype)
    for seq in plan:
        mine = q[row : row + seq.new].view(seq.new, kv_heads, group, dim).permute(1, 2, 0, 3)
        keys, values = seq.rows(k_cache), seq.rows(v_cache)
        done = _attend(mine, keys, values, seq, (kv_heads, group), (dim, 0), scale)
        out[row : row + seq.new].view(seq.new, kv_heads, group, dim).copy_(done.permute(2, 0, 1, 3))
        row += seq.new
    return out


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    seq: SeqPieces,
    heads: tuple[int, int],
    strides: tuple[int, int],
    scale: float,
) -> Tensor:
    """Attention of q[*heads, n, D] over all pieces; partial softmaxes are joined by their log-sum-exp.

    `strides` step through the heads of one slot of keys, values [..., Hkv, D]; 0 shares one head.
    """
    row, dim = keys.shape[-2] * keys.shape[-1], keys.shape[-1]

    def part(piece: _Piece) -> tuple[Tensor, Tensor]:
        size, stride = (*heads, piece.length, dim), (*strides, row, 1)
        k = keys.as_strided(size, stride, keys.storage_offset() + piece.start * row)
        v = values.as_strided(size, stride, values.storage_offset() + piece.start * row)
        return _flash(q, k, v, 0.0, piece.causal, attn_mask=seq.mask, scale=scale)

    out, total = part(seq.pieces[0])
    for piece in seq.pieces[1:]:
        more, lse = part(piece)
        out = torch.lerp(out, more, torch.sigmoid(lse - total).unsqueeze(-1))
        total = torch.logaddexp(total, lse)
    return out


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _plan_full(new: int, context: int, table: Tensor, block_size: int) -> SeqPieces:
    blocks = table[: -(-context // block_size)]
    breaks = [(at + 1) * block_size for at in (blocks.diff() != 1).nonzero().flatten().tolist()]
    # Prefill sees everything before its own tokens whole, and its own tokens causally, which takes one piece.
    own = context - new if new > 1 else context
    gather = context < _TOKENS_PER_EXTRA_PIECE * len(breaks) or any(own < at < context for at in breaks)
    order = range(len(blocks)) if gather else blocks.tolist()
    pieces = []
    for first, end in pairwise(sorted({0, own, context, *([] if gather else breaks)})):
        start = order[first // block_size] * block_size + first % block_size
        pieces.append(_Piece(start, end - first, causal=first >= own))
    return SeqPieces(new, blocks if gather else None, tuple(pieces))


def _plan_window(new: int, context: int, table: Tensor, block_size: int, window: int) -> SeqPieces:
    # The oldest new token sees `window` tokens, itself included.
    first = max(0, context - new + 1 - window)
    blocks = table[first // block_size : -(-context // block_size)]
    piece = _Piece(first % block_size, context - first)
    return SeqPieces(new, blocks, (piece,), _mask(new, piece.length, window) if new > 1 else None)


def _mask(new: int, length: int, window: int) -> Tensor:
    """[new, length], 0 where a query sees a key and -inf elsewhere."""
    query = torch.arange(length - new, length)[:, None]
    key = torch.arange(length)[None]
    hidden = (key > query) | (key <= query - window)
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
