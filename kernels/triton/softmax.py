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
def soft_capped(scores, cap):
    """cap * tanh(scores / cap)."""
    return cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
