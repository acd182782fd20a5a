"""GGUF's formats of 32 weights with a scale, as `GroupedWeight`: the numbers in the file, not yet expanded.

The layouts are those of ggml's `ggml-common.h`. Formats of other groups (Q6_K) or with codes in several
places (Q5) are expanded on loading instead.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import numpy.typing as npt
import torch

from kernels.grouped import GROUP, GroupedWeight

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
# Codes uint8[blocks, weights], and a scale and an offset float32[blocks, groups].
Parts = tuple[Bytes, Floats, Floats]


def grouped(raw: Bytes, kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> GroupedWeight | None:
    """A matrix [out, in] of a quantized tensor's bytes, or None for a format that is no such groups."""
    format_ = _FORMATS.get(kind)
    if format_ is None or len(shape) != 2:
        return None
    read, bits = format_
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    codes, scale, offset = read(raw.reshape(-1, block_bytes))
    groups = (shape[0], shape[1] // GROUP)
    return GroupedWeight(
        torch.from_numpy(codes.reshape(shape)),
        torch.from_numpy(scale.reshape(groups)),
        torch.from_numpy(offset.reshape(groups)),
        bits,
    )


def _q4_0(blocks: Bytes) -> Parts:
    scale = _halfs(blocks[:, :2])
    return _nibbles(blocks[:, 2:], 16), scale, scale * np.float32(-8)


def _q4_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 4:], 16), _halfs(blocks[:, :2]), _halfs(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> Parts:
    scale = _halfs(blocks[:, :2])
    # Signed bytes, moved up to 0...255.
    return blocks[:, 2:] ^ np.uint8(128), scale, scale * np.float32(-128)


def _q4_k(blocks: Bytes) -> Parts:
    scales, minima = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    scale = _halfs(blocks[:, :2]) * scales.astype(np.float32)
    offset = _halfs(blocks[:, 2:4]) * minima.astype(np.float32)
    return _nibbles(blocks[:, 16:], 32), scale, -offset


def _halfs(columns: Bytes) -> Floats:
    return np.ascontiguousarray(columns).view(np.float16).astype(np.float32)


def _nibbles(columns: Bytes, run: int) -> Bytes:
    """The low halves of `run` bytes, then their high halves, and so on."""
    runs = columns.reshape(len(columns), -1, 1, run)
    return np.concatenate((runs & np.uint8(15), runs >> np.uint8(4)), axis=2).reshape(len(columns), -1)


_FORMATS: dict[gguf.GGMLQuantizationType, tuple[Callable[[Bytes], Parts], int]] = {
    gguf.GGMLQuantizationType.Q4_0: (_q4_0, 4),
    gguf.GGMLQuantizationType.Q4_1: (_q4_1, 4),
    gguf.GGMLQuantizationType.Q4_K: (_q4_k, 4),
    gguf.GGMLQuantizationType.Q8_0: (_q8_0, 8),
}
