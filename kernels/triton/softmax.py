"""Arithmetic that prefill and decode share. Exponentials are of base 2, which is what GPUs compute."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def product(a, b, acc):
    """acc + a @ b in float32; float32 factors are not rounded to tf32."""
    if INTERPRETED:
        # Triton's interpreter would multiply the bit patterns of bfloat16.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def scores_of(q, k, scale, softcap, CAPPED: tl.constexpr):
    """Scores [M, N] of q[M, D] and k[N, D] in units of log2(e), which `scale` includes unless CAPPED."""
    scores = product(q, tl.trans(k), None) * scale
    if CAPPED:
        # tanh(x) is 2 * sigmoid(2 * x) - 1.
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * LOG2E
    return scores


@triton.jit
def nothing_yet(ROWS: tl.constexpr, PADDED: tl.constexpr):
    """The running softmax of no keys: accumulator, total, top score."""
    acc, total = tl.zeros([ROWS, PADDED], tl.float32), tl.zeros([ROWS], tl.float32)
    return acc, total, tl.full([ROWS], float("-inf"), tl.float32)


@triton.jit
def take_in(acc, total, top, scores, v, SOME_UNSEEN: tl.constexpr):
    """Add keys to a running softmax (Milakov and Gimelshein 2018): sums so far, relative to the top score.

    acc is float32[M, D], total and top float32[M]; scores [M, N] are -inf for what a row does not see.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet must not subtract infinity from infinity.
    base = tl.where(new_top == float("-inf"), 0.0, new_top) if SOME_UNSEEN else new_top
    weights, shrink = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = product(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, total, new_top
