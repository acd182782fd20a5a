"""What the Triton kernels are tried on: sizes, and tensors of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels import ops
from kernels import triton as fast


@dataclass(frozen=True)
class Size:
    """How much of everything. `batch` sequences decode from `context` tokens; prefills are (new, context)."""

    prefills: tuple[tuple[int, int], ...]
    batch: int
    context: int
    heads: int
    kv_heads: int
    dim: int
    page: int
    rows: int
    hidden: int
    inner: int
    vocab: int
    layers: int
    blocks: int


TINY = Size(((3, 20), (33, 33)), 2, 40, 4, 2, 32, 16, 3, 64, 96, 500, 2, 3)
CHECK = Size(
    ((1, 700), (129, 129), (63, 1000), (300, 2000)), 5, 1500, 32, 8, 128, 16, 300, 4096, 1500, 50_000, 3, 9
)
FULL = Size(((8192, 8192),), 64, 8192, 32, 8, 128, 16, 8192, 4096, 14_336, 128_256, 32, 512)


@dataclass(frozen=True)
class Case:
    """`truth()` before `run()`, which may work in place.

    Attributes:
        run: launches the kernel, and nothing else.
        truth: what is right, in float64.
        outputs: from what `run` returns to what is compared with that.
        moved: bytes that must be read or written.
        tolerance: of the largest error, relative to the largest value; 0 for equality.
        flops: products and sums, where they matter.
    """

    name: str
    run: Callable
    truth: Callable
    moved: int
    tolerance: float = 0.0
    flops: float = 0.0
    outputs: Callable = list


def normal(*shape, device, dtype, seed=0):
    """Normal numbers, made where they are needed."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def rounding(dtype):
    """Relative error that rounding to a dtype (and of float32 sums) may make."""
    return {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]


def paged(lens, size, device, dtype, dim, float8):
    """Caches, scales and sequences whose blocks are scattered."""
    counts = [-(-context // size.page) for _, context in lens]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(1))
    tables, at = torch.zeros(len(lens), max(counts), dtype=torch.int64), 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[at : at + count]
        at += count
    shape = (len(order), size.page, size.kv_heads, dim)
    caches = [normal(*shape, device=device, dtype=dtype, seed=seed) for seed in (2, 3)]
    scales = None
    if float8:
        caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
        scales = tuple(torch.linspace(0.5, 1.5, size.kv_heads, device=device) for _ in range(2))
    seqs = ops.PagedSeqs(tuple(n for n, _ in lens), tuple(c for _, c in lens), tables, size.page)
    return caches, scales, seqs


def angles(count, size, device, dtype):
    angle = torch.arange(count, device=device)[:, None] * torch.logspace(0, -4, size.dim // 2, device=device)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def write_target(size, device, dtype, float8):
    blocks = -(-size.rows // size.page) + 1
    shape = (blocks, size.page, size.kv_heads, size.dim)
    caches = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)]
    scales = None
    if float8:
        caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
        scales = tuple(torch.linspace(0.01, 0.02, size.kv_heads, device=device) for _ in range(2))
    order = torch.randperm(blocks * size.page, generator=torch.Generator().manual_seed(1))
    return caches, scales, order[: size.rows].to(device)


def stacked(size, device, dtype):
    """Caches of all layers with twice the blocks that a case touches, and those, scattered."""
    shape = (size.layers, 2, 2 * size.blocks, size.page, size.kv_heads, size.dim)
    caches = normal(*shape, device=device, dtype=dtype)
    order = torch.randperm(2 * size.blocks, generator=torch.Generator().manual_seed(1)).to(device)
    moved = caches[:, :, : size.blocks].nbytes
    return caches, fast.layers_of(caches), order[: size.blocks], order[size.blocks :], moved
