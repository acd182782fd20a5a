"""Tile sizes of the attention kernels: one table, looked up, never searched while a request waits.

Source: chosen by register and shared-memory use at compile time (`benchmarks/kernel_resources.py`), so that
nothing spills; not measured on a GPU yet. `python benchmarks/gpu.py --tune` prints a table to put here, with
the GPU it was measured on as its source. The page size makes no difference: every token's page is looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Tile:
    """One program's share.

    Attributes:
        rows: (token, query head) pairs of a prefill program; a decode takes all heads of a group.
        keys: cached tokens read at a time.
        warps: of 32 threads.
        stages: of the software pipeline, from looking a page up to multiplying what it holds.
    """

    rows: int
    keys: int
    warps: int
    stages: int


# Padded head dimension -> tile, for 16-bit queries. Keys are found through a table, which takes a read of its
# own: from 5 stages on a tile of keys is read while the one before it is multiplied.
_AMPERE = {
    16: Tile(64, 64, 4, 5),
    32: Tile(64, 64, 4, 5),
    64: Tile(128, 64, 8, 5),
    128: Tile(128, 32, 8, 3),
    256: Tile(64, 16, 8, 2),
}
_HOPPER = {
    16: Tile(64, 64, 4, 5),
    32: Tile(64, 64, 4, 5),
    64: Tile(128, 64, 8, 5),
    128: Tile(128, 64, 8, 5),
    256: Tile(64, 64, 8, 2),
}
_BLACKWELL = {
    16: Tile(128, 64, 8, 5),
    32: Tile(128, 64, 8, 5),
    64: Tile(128, 128, 8, 5),
    128: Tile(128, 64, 8, 5),
    256: Tile(64, 64, 8, 2),
}
PREFILL = {"sm_80": _AMPERE, "sm_90": _HOPPER, "sm_100": _BLACKWELL}
_SINGLE = {
    16: Tile(16, 64, 4, 5),
    32: Tile(16, 64, 4, 5),
    64: Tile(16, 64, 4, 5),
    128: Tile(16, 32, 4, 5),
    256: Tile(16, 16, 4, 5),
}
DECODE = {"sm_80": _SINGLE, "sm_90": _SINGLE, "sm_100": _SINGLE}
# float32 serves checks, not speed: its products take many registers and no tensor cores.
PREFILL_FLOAT32 = {
    16: Tile(32, 32, 4, 1),
    32: Tile(32, 32, 4, 1),
    64: Tile(16, 16, 4, 1),
    128: Tile(16, 16, 8, 1),
    256: Tile(32, 32, 16, 1),
}
DECODE_FLOAT32 = {
    16: Tile(16, 32, 4, 1),
    32: Tile(16, 32, 4, 1),
    64: Tile(16, 32, 8, 1),
    128: Tile(16, 16, 8, 1),
    256: Tile(16, 16, 8, 1),
}

# Cached tokens one decode program reads, and the most programs that share a KV head of a sequence: beyond
# their product pieces grow. Both are fixed, so that a sequence's result does not depend on its batch; the
# second one bounds the grid of a CUDA graph, which is that of the longest context.
SPLIT_TOKENS, MOST_PIECES = 512, 32


def prefill_tile(gpu: str, padded_dim: int, dtype: torch.dtype) -> Tile:
    """The tile of `paged_prefill`; head dimensions are padded to a power of two, 16 at least, 256 at most."""
    return (PREFILL_FLOAT32 if dtype == torch.float32 else PREFILL[gpu])[padded_dim]


def decode_tile(gpu: str, padded_dim: int, dtype: torch.dtype) -> Tile:
    """The tile of `paged_decode`."""
    return (DECODE_FLOAT32 if dtype == torch.float32 else DECODE[gpu])[padded_dim]


def padded(dim: int) -> int:
    """The power of two a head dimension is padded to. Raises `ValueError` for one beyond the tables."""
    if not 1 <= dim <= 256:
        raise ValueError(f"head dimension {dim}: the kernels are made for 1 to 256")
    return max(16, 1 << (dim - 1).bit_length())


@lru_cache
def gpu_class(device: torch.device) -> str:
    """Which rows of the tables hold for a device; the CPU (an interpreted kernel) takes those of sm_80."""
    if device.type != "cuda":
        return "sm_80"
    major, _ = torch.cuda.get_device_capability(device)
    # 8.6, 8.9 and 12.x have a third of the shared memory of 9.0; the rows of sm_80 fit them.
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


@lru_cache
def converts_float8(device: torch.device) -> bool:
    """Whether the GPU has instructions that convert float8 (e4m3): from 8.9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
