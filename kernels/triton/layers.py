"""Where the blocks of all layers' caches lie, so that one launch reaches them all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layers:
    """Addresses of all caches, keys and values of layer 0, 1, ...; made once, when the caches are.

    Attributes:
        bases: int64[2 * L] on the device: first byte of each cache.
        num_layers: L.
        shape: (block_size, Hkv, D) of every block.
        dtype: of every cache.
        stride: bytes from one block to the next.
        align: 16, or the largest power of two below that divides every address and the stride.
        caches: keeps the memory.
    """

    bases: Tensor
    num_layers: int
    shape: tuple[int, int, int]
    dtype: torch.dtype
    stride: int
    align: int
    caches: tuple[Tensor, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one cache."""
        return self.shape[1] * self.shape[2] * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one cache."""
        return self.shape[0] * self.token_bytes


def layers_of(caches: Sequence[tuple[Tensor, Tensor]] | Tensor) -> Layers:
    """From pairs (keys, values), each [num_blocks, block_size, Hkv, D], or all in one tensor [L, 2, ...].

    Raises `ValueError` when the caches differ in shape, dtype or layout, or a block is not contiguous.
    """
    flat = tuple(cache for pair in caches for cache in pair)
    first = flat[0]
    if any(
        (c.shape, c.dtype, c.stride(), c.device) != (first.shape, first.dtype, first.stride(), first.device)
        for c in flat
    ):
        raise ValueError("the caches of all layers must have one shape, dtype, layout and device")
    if not first[0].is_contiguous():
        raise ValueError("a block of a cache must be contiguous")
    addresses, stride = [cache.data_ptr() for cache in flat], first.stride(0) * first.element_size()
    return Layers(
        bases=torch.tensor(addresses, dtype=torch.int64).to(first.device),
        num_layers=len(flat) // 2,
        shape=(first.shape[1], first.shape[2], first.shape[3]),
        dtype=first.dtype,
        stride=stride,
        align=math.gcd(16, stride, *addresses),
        caches=flat,
    )
