"""New keys and values into their pages, in one pass with the rotary embedding of queries and keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.float8 import to_e4m3
from kernels.triton.plan import cache_bytes, scale_pointers

HEADS = 8  # heads a program takes


@triton.jit
def _store(cache, at, values, live, FLOAT8: tl.constexpr):
    if FLOAT8:
        tl.store(cache + at, to_e4m3(values), mask=live)
    else:
        tl.store(cache + at, values.to(cache.dtype.element_ty), mask=live)


@triton.jit
def rope_kernel(
    x, cos, sin, k_cache, v_cache, k_scales, v_scales, slots,
    stride_xt, stride_xh, stride_cos, stride_cos1, stride_sin, stride_sin1,
    stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, heads, kv_heads,
    HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    FLOAT8: tl.constexpr,
):  # fmt: skip
    """Program (token, tile of heads) of x[T, heads (queries), kv_heads (keys), kv_heads (values); 2 * HALF].

    Queries are rotated in place. Rotated keys and values go to their slots, and x keeps them as they were.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, PADDED)
    wide = (column < HALF)[None, :]
    live = (head < heads + 2 * kv_heads)[:, None] & wide
    at = x + token * stride_xt + head[:, None] * stride_xh + column[None, :]
    first = tl.load(at, mask=live, other=0).to(tl.float32)
    second = tl.load(at + HALF, mask=live, other=0).to(tl.float32)
    c = tl.load(cos + token * stride_cos + column * stride_cos1, mask=column < HALF, other=0).to(tl.float32)
    s = tl.load(sin + token * stride_sin + column * stride_sin1, mask=column < HALF, other=0).to(tl.float32)
    left = first * c[None, :] - second * s[None, :]
    right = second * c[None, :] + first * s[None, :]
    query = (head < heads)[:, None] & wide
    tl.store(at, left.to(x.dtype.element_ty), mask=query)
    tl.store(at + HALF, right.to(x.dtype.element_ty), mask=query)
    slot = tl.load(slots + token)
    block, place = slot // PAGE, slot % PAGE
    k_head = head - heads
    is_key = (k_head >= 0) & (k_head < kv_heads)
    if FLOAT8:
        scale = tl.load(k_scales + k_head, mask=is_key, other=1.0)[:, None]
        left, right = tl.div_rn(left, scale), tl.div_rn(right, scale)
    k_at = block * stride_kb + place * stride_ks + k_head[:, None] * stride_kh + column[None, :]
    _store(k_cache, k_at, left, is_key[:, None] & wide, FLOAT8)
    _store(k_cache, k_at + HALF, right, is_key[:, None] & wide, FLOAT8)
    v_head = k_head - kv_heads
    is_value = (v_head >= 0) & (v_head < kv_heads)
    if FLOAT8:
        scale = tl.load(v_scales + v_head, mask=is_value, other=1.0)[:, None]
        first, second = tl.div_rn(first, scale), tl.div_rn(second, scale)
    v_at = block * stride_vb + place * stride_vs + v_head[:, None] * stride_vh + column[None, :]
    _store(v_cache, v_at, first, is_value[:, None] & wide, FLOAT8)
    _store(v_cache, v_at + HALF, second, is_value[:, None] & wide, FLOAT8)


def rope_kv_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As `kernels.reference.rope_kv_write`; the queries are rotated in place, and a view of qkv returned."""
    (tokens, all_heads, dim), (page, kv_heads) = qkv.shape, k_cache.shape[1:3]
    heads = all_heads - 2 * kv_heads
    if tokens:
        rope_kernel[(tokens, triton.cdiv(all_heads, HEADS))](
            qkv, cos, sin, cache_bytes(k_cache), cache_bytes(v_cache), *scale_pointers(kv_scales, qkv), slots,
            qkv.stride(0), qkv.stride(1), *cos.stride(), *sin.stride(),
            *k_cache.stride()[:3], *v_cache.stride()[:3], heads, kv_heads,
            HALF=dim // 2, PADDED=triton.next_power_of_2(dim // 2), HEADS=HEADS, PAGE=page,
            FLOAT8=kv_scales is not None, num_warps=4,
        )  # fmt: skip
    return qkv[:, :heads]
