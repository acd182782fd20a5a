"""y = x @ weight.T + bias with a weight that stays quantized: 4 or 8 bits read per weight instead of 32.

At few rows a product waits for weights to come from memory, so the fewer bytes the better. A tile of `LANES`
outputs is expanded into a scratch that fits into the first-level cache, part by part along the input, and
every row is multiplied with it there. The numbers are those of the dense float32 weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from kernels.grouped import GROUP, GroupedWeight
from kernels.parallel import claim, worker
from kernels.simd import LANES, expander, multiplier

# Groups expanded at a time: 24 KiB of float32.
_PART_GROUPS = 6
_PART_FLOATS = _PART_GROUPS * GROUP * LANES
# Rows worked on between two looks at the same tile: their inputs should stay in the second-level cache.
_CHUNK_ROWS = 128
_ALIGN = 64

_expand4, _expand8 = expander(4), expander(8)
_multiply1, _multiply2, _multiply4, _multiply8 = (multiplier(rows) for rows in (1, 2, 4, 8))


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight as the kernel reads it, `out` padded with zeros to whole tiles.

    Attributes:
        codes: uint8[tiles, in * bits // 8, LANES].
        scale: float32[tiles, in // 32, LANES].
        offset: float32[tiles, in // 32, LANES].
        bias: float32[tiles * LANES].
        bits: 4 or 8.
        out_features: outputs without padding.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor
    bias: Tensor
    bits: int
    out_features: int

    @property
    def tiles(self) -> int:
        """Groups of `LANES` outputs."""
        return len(self.codes)

    def __call__(self, x: Tensor) -> Tensor:
        """y[T, out] of x[T, in]."""
        rows = len(x)
        x = x if x.stride(-1) == 1 else x.contiguous()
        y = torch.empty(rows, self.tiles * LANES)
        _linear(
            self.tiles * -(-rows // _CHUNK_ROWS),
            self.tiles,
            rows,
            self.scale.shape[1],
            self.bits,
            self.codes.data_ptr(),
            self.scale.data_ptr(),
            self.offset.data_ptr(),
            self.bias.data_ptr(),
            x.data_ptr(),
            4 * x.stride(0),
            y.data_ptr(),
            4 * y.stride(0),
        )
        return y[:, : self.out_features]


def pack(weight: GroupedWeight, bias: Tensor | None) -> PackedWeight:
    """Lay a weight out in tiles; it is not kept itself."""
    codes = _tiled(weight.codes)
    if weight.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    out_features = len(weight.codes)
    padded = torch.zeros(len(codes) * LANES)
    if bias is not None:
        padded[:out_features] = bias
    return PackedWeight(codes, _tiled(weight.scale), _tiled(weight.offset), padded, weight.bits, out_features)


def _tiled(values: Tensor) -> Tensor:
    """[out, n] as [tiles, n, LANES]."""
    padded = torch.nn.functional.pad(values, (0, 0, 0, -len(values) % LANES))
    return padded.view(-1, LANES, values.shape[1]).transpose(1, 2).contiguous()


@numba.njit(error_model="numpy")
def _multiply(
    weights: int,
    inputs: int,
    rows: int,
    x: int,
    x_stride: int,
    start: int,
    start_stride: int,
    y: int,
    y_stride: int,
) -> None:
    """All rows, eight at a time; what is left in fours, twos and one."""
    row = 0
    while rows - row >= 8:
        _multiply8(
            weights, inputs, x + row * x_stride, x_stride, start + row * start_stride, start_stride,
            y + row * y_stride, y_stride,
        )  # fmt: skip
        row += 8
    if rows - row >= 4:
        _multiply4(
            weights, inputs, x + row * x_stride, x_stride, start + row * start_stride, start_stride,
            y + row * y_stride, y_stride,
        )  # fmt: skip
        row += 4
    if rows - row >= 2:
        _multiply2(
            weights, inputs, x + row * x_stride, x_stride, start + row * start_stride, start_stride,
            y + row * y_stride, y_stride,
        )  # fmt: skip
        row += 2
    if rows - row >= 1:
        _multiply1(
            weights, inputs, x + row * x_stride, x_stride, start + row * start_stride, start_stride,
            y + row * y_stride, y_stride,
        )  # fmt: skip


@worker
def _linear(args: Any) -> None:
    items, tiles, rows, groups, bits = args[1], args[2], args[3], args[4], args[5]
    codes, scale, offset, bias = args[6], args[7], args[8], args[9]
    x, x_stride, y, y_stride = args[10], args[11], args[12], args[13]
    memory = np.empty(_PART_FLOATS + _ALIGN // 4, np.float32)
    scratch: Any = -(-np.int64(memory.ctypes.data) // _ALIGN) * _ALIGN
    item = claim(args)
    while item < items:
        tile, first = item % tiles, item // tiles * _CHUNK_ROWS
        here = min(_CHUNK_ROWS, rows - first)
        target = y + first * y_stride + tile * LANES * 4
        for group in range(0, groups, _PART_GROUPS):
            count, at = min(_PART_GROUPS, groups - group), tile * groups + group
            code, place = codes + at * GROUP * LANES * bits // 8, at * LANES * 4
            if bits == 4:
                _expand4(code, scale + place, offset + place, count, scratch)
            else:
                _expand8(code, scale + place, offset + place, count, scratch)
            begin, begin_stride = (bias + tile * LANES * 4, 0) if group == 0 else (target, y_stride)
            _multiply(
                scratch,
                count * GROUP,
                here,
                x + first * x_stride + group * GROUP * 4,
                x_stride,
                begin,
                begin_stride,
                target,
                y_stride,
            )
        item = claim(args)
    memory[0] = 0  # numba frees an array after its last use
