"""How attention reads the pages of a cache: rows of one head, found through a block table."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.float8 import from_e4m3


@triton.jit
def blocks_of(table, at, seen, PAGE: tl.constexpr):
    """int64[N]: blocks that hold cached tokens `at` int32[N]; 0 where not `seen`."""
    return tl.load(table + at // PAGE, mask=seen, other=0).to(tl.int64)


@triton.jit
def load_rows(
    cache, blocks, places, seen, stride_block, stride_slot, as_type: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, FLOAT8: tl.constexpr, NATIVE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[N, PADDED] of `as_type`: places in blocks, both [N]; 0 past DIM, and where MASKED and not `seen`.

    What is not seen is not read: unused slots may hold NaN, which no weight of 0 would take away.
    """
    column = tl.arange(0, PADDED)
    offsets = blocks * stride_block + places.to(tl.int64) * stride_slot
    rows = cache + offsets[:, None] + column[None, :]
    if MASKED:
        if DIM == PADDED:
            found = tl.load(rows, mask=seen[:, None], other=0)
        else:
            found = tl.load(rows, mask=seen[:, None] & (column < DIM)[None, :], other=0)
    elif DIM == PADDED:
        found = tl.load(rows)
    else:
        found = tl.load(rows, mask=(column < DIM)[None, :], other=0)
    if FLOAT8:
        return from_e4m3(found, NATIVE).to(as_type)
    return found.to(as_type)
