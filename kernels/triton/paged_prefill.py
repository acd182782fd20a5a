"""Attention of new tokens over a paged prefix and themselves: FlashAttention (Dao 2023), extended over pages.

One launch takes sequences of any lengths. A program takes one tile: some (token, query head) pairs of one KV
head's group, token by token, so that every key and value is read once for the whole group. Keys that all rows
of a tile see need no mask; the causal edge comes last. With a sliding window all keys are masked.
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


@triton.jit
def _pass(
    acc, total, top, q, query_at, first, end, table, k_head, v_head,
    stride_kb, stride_ks, stride_vb, stride_vs, scale, softcap, window,
    DIM: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, FLOAT8: tl.constexpr, NATIVE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take in keys first ... end - 1; without MASKED, whole tiles of keys that every row sees."""
    for start in range(first, end, KEYS):
        at = start + tl.arange(0, KEYS)
        seen = at < end
        blocks, places = blocks_of(table, at, seen, PAGE), at % PAGE
        k = load_rows(
            k_head, blocks, places, seen, stride_kb, stride_ks, q.dtype, DIM, PADDED, FLOAT8, NATIVE, MASKED
        )
        scores = scores_of(q, k, scale, softcap, CAPPED)
        if MASKED:
            shown = at[None, :] <= query_at[:, None]
            if WINDOWED:
                shown = shown & (at[None, :] > query_at[:, None] - window)
            scores = tl.where(shown, scores, float("-inf"))
        v = load_rows(
            v_head, blocks, places, seen, stride_vb, stride_vs, q.dtype, DIM, PADDED, FLOAT8, NATIVE, MASKED
        )
        acc, total, top = take_in(acc, total, top, scores, v, MASKED)
    return acc, total, top


@triton.jit(do_not_specialize=["stride_table"])  # it varies from step to step, see `paged_decode`
def prefill_kernel(
    q_ptr, k_cache, v_cache, out_ptr, k_scales, v_scales, tables, starts, contexts, tiles,
    stride_table, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ot, stride_oh, scale, softcap, window,
    GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    FLOAT8: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head) for tiles int32[n, 2] of (sequence, first row of (token, query head) pairs).

    `scale` includes log2(e) unless CAPPED. tables int32[S, *], starts int32[S + 1], contexts int32[S].
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    seq, first_row = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    row = first_row + tl.arange(0, ROWS)
    start, context = tl.load(starts + seq), tl.load(contexts + seq)
    new = tl.load(starts + seq + 1) - start
    token, query_head = row // GROUP, head * GROUP + row % GROUP
    column = tl.arange(0, PADDED)
    live = (token < new)[:, None] & (column < DIM)[None, :]
    q_at = (start + token).to(tl.int64) * stride_qt + query_head * stride_qh
    q = tl.load(q_ptr + q_at[:, None] + column[None, :], mask=live, other=0)
    prefix = context - new
    query_at = prefix + token
    oldest = prefix + first_row // GROUP
    newest = prefix + tl.minimum((first_row + ROWS - 1) // GROUP, new - 1)
    table = tables + seq.to(tl.int64) * stride_table
    k_head, v_head = k_cache + head.to(tl.int64) * stride_kh, v_cache + head.to(tl.int64) * stride_vh
    if FLOAT8:
        scale = scale * tl.load(k_scales + head)
    acc, total, top = nothing_yet(ROWS, PADDED)
    if WINDOWED:
        first = tl.maximum(oldest - window + 1, 0) // KEYS * KEYS
    else:
        first = (oldest + 1) // KEYS * KEYS
        acc, total, top = _pass(
            acc, total, top, q, query_at, 0, first, table, k_head, v_head,
            stride_kb, stride_ks, stride_vb, stride_vs, scale, softcap, window,
            DIM, PADDED, KEYS, PAGE, WINDOWED, CAPPED, FLOAT8, NATIVE, False,
        )  # fmt: skip
    acc, total, top = _pass(
        acc, total, top, q, query_at, first, newest + 1, table, k_head, v_head,
        stride_kb, stride_ks, stride_vb, stride_vs, scale, softcap, window,
        DIM, PADDED, KEYS, PAGE, WINDOWED, CAPPED, FLOAT8, NATIVE, True,
    )  # fmt: skip
    acc = acc / tl.where(token < new, total, 1.0)[:, None]
    if FLOAT8:
        acc = acc * tl.load(v_scales + head)
    out_at = (start + token).to(tl.int64) * stride_ot + query_head * stride_oh
    tl.store(out_ptr + out_at[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=live)


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Plan,
    scale: float,
    *,
    softcap: float | None = None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    tile: configs.Tile | None = None,
) -> Tensor:
    """As `kernels.reference.paged_prefill`; caches of q's dtype, or float8 (e4m3) with scales float32[Hkv].

    `tile` overrules the table of `configs`.
    """
    heads, dim = q.shape[1:]
    page, kv_heads = k_cache.shape[1:3]
    wide = configs.padded(dim)
    tiles = plan.given_tiles if tile is None else None
    tile = tile or configs.prefill_tile(configs.gpu_class(q.device), wide, q.dtype)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    seqs = plan.on(q.device)
    if tiles is None:
        tiles = plan.tiles(q.device, tile.rows, heads // kv_heads)
    float8 = kv_scales is not None
    prefill_kernel[(len(tiles), kv_heads)](
        q, cache_bytes(k_cache), cache_bytes(v_cache), out, *scale_pointers(kv_scales, q),
        seqs.tables, seqs.starts, seqs.contexts, tiles, seqs.tables.stride(0),
        q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3], out.stride(0), out.stride(1),
        scale if softcap is not None else scale * LOG2E.value, softcap or 0.0, plan.window or 0,
        GROUP=heads // kv_heads, DIM=dim, PADDED=wide, ROWS=tile.rows, KEYS=tile.keys, PAGE=page,
        WINDOWED=plan.window is not None, CAPPED=softcap is not None,
        FLOAT8=float8, NATIVE=configs.converts_float8(q.device),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
