"""Attention of one new token a sequence: split-K flash decoding (Dao et al. 2023) over block tables.

A program takes one piece of a sequence's context for all query heads of one KV head: each key and value is
read once. A second launch joins the pieces by their log-sum-exp; where no context is longer than a piece
there is none. Into which pieces a context is cut follows from its own length, which is read on the device: a
result does not depend on the batch, and the launch for a longer context serves a shorter one, whose missing
pieces leave at once (that is how a CUDA graph is replayed).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton import configs
from kernels.triton.pages import blocks_of, load_rows
from kernels.triton.plan import Plan, cache_bytes, scale_pointers
from kernels.triton.softmax import LOG2E, nothing_yet, scores_of, take_in

JOINED = 16  # pieces the second launch takes at a time
# From step to step: kernels for 1, multiples of 16 and the rest would be compiled while requests wait.
VARYING = ["stride_table", "num_pieces"]


@triton.jit
def _cut(contexts, seq, window, WINDOWED: tl.constexpr, PIECE: tl.constexpr, MOST: tl.constexpr):
    """First cached token a sequence's new one sees, the end of its context, and tokens of a piece."""
    end = tl.load(contexts + seq)
    begin = tl.maximum(end - window, 0) if WINDOWED else end * 0
    return begin, end, tl.maximum(PIECE, tl.cdiv(end - begin, MOST))


@triton.jit(do_not_specialize=VARYING)
def decode_kernel(
    q_ptr, k_cache, v_cache, pieces, lse, k_scales, v_scales, tables, contexts,
    stride_table, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    heads, num_pieces, scale, softcap, window,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, PIECE: tl.constexpr, MOST: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, FLOAT8: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head, piece): pieces [S, num_pieces, Hq, DIM], lse float32[S, num_pieces, Hq].

    `scale` includes log2(e) unless CAPPED; so does the log-sum-exp. Pieces without tokens are not written,
    except for the first one: zeros and -inf.
    """
    seq, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end, length = _cut(contexts, seq, window, WINDOWED, PIECE, MOST)
    begin += piece * length
    if (piece > 0) & (begin >= end):
        return
    end = tl.minimum(begin + length, end)
    member = tl.arange(0, ROWS)
    query_head = head * GROUP + member
    column = tl.arange(0, PADDED)
    live = (member < GROUP)[:, None] & (column < DIM)[None, :]
    q_at = seq.to(tl.int64) * stride_qt + query_head * stride_qh
    q = tl.load(q_ptr + q_at[:, None] + column[None, :], mask=live, other=0)
    table = tables + seq.to(tl.int64) * stride_table
    k_head, v_head = k_cache + head.to(tl.int64) * stride_kh, v_cache + head.to(tl.int64) * stride_vh
    if FLOAT8:
        scale = scale * tl.load(k_scales + head)
    acc, total, top = nothing_yet(ROWS, PADDED)
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        seen = at < end
        blocks, places = blocks_of(table, at, seen, PAGE), at % PAGE
        k = load_rows(
            k_head, blocks, places, seen, stride_kb, stride_ks, q.dtype, DIM, PADDED, FLOAT8, NATIVE, True
        )
        scores = tl.where(seen[None, :], scores_of(q, k, scale, softcap, CAPPED), float("-inf"))
        v = load_rows(
            v_head, blocks, places, seen, stride_vb, stride_vs, q.dtype, DIM, PADDED, FLOAT8, NATIVE, True
        )
        acc, total, top = take_in(acc, total, top, scores, v, False)
    some = end > begin
    acc = acc / tl.where(some, total, 1.0)[:, None]
    if FLOAT8:
        acc = acc * tl.load(v_scales + head)
    row = (seq.to(tl.int64) * num_pieces + piece) * heads + query_head
    tl.store(pieces + row[:, None] * DIM + column[None, :], acc.to(pieces.dtype.element_ty), mask=live)
    logs = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(lse + row, logs, mask=member < GROUP)


@triton.jit(do_not_specialize=VARYING[1:])
def join_kernel(
    pieces, lse, out, contexts, heads, num_pieces, window, DIM: tl.constexpr, PADDED: tl.constexpr,
    PIECE: tl.constexpr, MOST: tl.constexpr, WINDOWED: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Program (sequence, query head): out[S, Hq, DIM] from what `decode_kernel` wrote."""
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end, length = _cut(contexts, seq, window, WINDOWED, PIECE, MOST)
    written = tl.cdiv(end - begin, length)
    column = tl.arange(0, PADDED)
    acc = tl.zeros([PADDED], tl.float32)
    total, top = 0.0, float("-inf")
    for first in range(0, written, JOINED):
        piece = first + tl.arange(0, JOINED)
        row = (seq * num_pieces + piece) * heads + head
        logs = tl.load(lse + row, mask=piece < written, other=float("-inf"))
        live = (piece < written)[:, None] & (column < DIM)[None, :]
        part = tl.load(pieces + row[:, None] * DIM + column[None, :], mask=live, other=0)
        new_top = tl.maximum(top, tl.max(logs, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights, shrink = tl.exp2(logs - base), tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * part, 0)
        top = new_top
    acc = acc / tl.where(total == 0.0, 1.0, total)
    at = (seq * heads + head) * DIM + column
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=column < DIM)


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Plan,
    scale: float,
    *,
    softcap: float | None = None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    tile: configs.Tile | None = None,
    piece: int = configs.SPLIT_TOKENS,
    most_pieces: int = configs.MOST_PIECES,
) -> Tensor:
    """As `kernels.reference.paged_decode`; caches of q's dtype, or float8 (e4m3) with scales float32[Hkv].

    A sequence without context gives zeros. `tile`, `piece` and `most_pieces` overrule `configs`.
    """
    (count, heads, dim), (page, kv_heads) = q.shape, k_cache.shape[1:3]
    group, wide = heads // kv_heads, configs.padded(dim)
    tile = tile or configs.decode_tile(configs.gpu_class(q.device), wide, q.dtype)
    out = torch.empty((count, heads, dim), dtype=q.dtype, device=q.device)
    num_pieces = min(max(1, -(-plan.longest // piece)), most_pieces)
    # A single piece is the result itself.
    pieces = out if num_pieces == 1 else q.new_empty((count, num_pieces, heads, dim), dtype=torch.float32)
    lse = q.new_empty((count, num_pieces, heads), dtype=torch.float32)
    seqs = plan.on(q.device)
    decode_kernel[(count, kv_heads, num_pieces)](
        q, cache_bytes(k_cache), cache_bytes(v_cache), pieces, lse, *scale_pointers(kv_scales, q),
        seqs.tables, seqs.contexts, seqs.tables.stride(0), q.stride(0), q.stride(1),
        *k_cache.stride()[:3], *v_cache.stride()[:3], heads, num_pieces,
        scale if softcap is not None else scale * LOG2E.value, softcap or 0.0, plan.window or 0,
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), DIM=dim, PADDED=wide, KEYS=tile.keys,
        PAGE=page, PIECE=piece, MOST=most_pieces, WINDOWED=plan.window is not None,
        CAPPED=softcap is not None, FLOAT8=kv_scales is not None, NATIVE=configs.converts_float8(q.device),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if num_pieces > 1:
        join_kernel[(count, heads)](
            pieces, lse, out, seqs.contexts, heads, num_pieces, plan.window or 0, DIM=dim, PADDED=wide,
            PIECE=piece, MOST=most_pieces, WINDOWED=plan.window is not None, JOINED=JOINED, num_warps=4,
        )  # fmt: skip
    return out
