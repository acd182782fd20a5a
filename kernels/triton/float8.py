"""float8 (e4m3) numbers as bytes: by the GPU's own instructions (NATIVE), or by arithmetic where it has none.

Both give the same numbers for everything but NaN, which arithmetic reads as +-480 and never writes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def from_e4m3(code, NATIVE: tl.constexpr):
    """float16 of uint8 codes, exactly."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    # The code's exponent and mantissa are float16's with 3 mantissa bits and a bias less by 8.
    wide = code.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def to_e4m3(x):
    """uint8 codes of float32[...], rounded to nearest even, beyond +-448 cut to that."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    # Below 2**-6 a code counts steps of 2**-9: adding 2**14, whose own steps are that large, rounds to them.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) & 0x7F
    wide = size.to(tl.uint32, bitcast=True)
    large = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - (120 << 3)
    return (sign | tl.where(size < 0.015625, small, large)).to(tl.uint8)
