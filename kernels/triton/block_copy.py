"""Whole blocks, or their heads, copied in all layers by one launch: copy-on-write, gather and scatter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.layers import Layers

TILE = 2048  # words a program copies
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


# The ids are rows of one tensor of any length: a kernel for each alignment would be compiled on the way.
@triton.jit(do_not_specialize_on_alignment=["src_ids", "dst_ids", "tokens"])
def copy_kernel(
    src_bases, dst_bases, src_ids, dst_ids, tokens, src_stride, dst_stride, token_words,
    WORD: tl.constexpr, ALIGN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (pair, cache, tile): a block's first tokens[pair] tokens. Strides in words, bases in bytes."""
    pair, cache, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = tile * TILE + tl.arange(0, TILE)
    live = at < tl.load(tokens + pair) * token_words
    src = tl.multiple_of(tl.load(src_bases + cache).to(tl.pointer_type(WORD)), ALIGN)
    dst = tl.multiple_of(tl.load(dst_bases + cache).to(tl.pointer_type(WORD)), ALIGN)
    values = tl.load(src + tl.load(src_ids + pair) * src_stride + at, mask=live)
    tl.store(dst + tl.load(dst_ids + pair) * dst_stride + at, values, mask=live)


def block_copies(layers: Layers, copies: Sequence[tuple[int, int, int]]) -> None:
    """Copy the first tokens of blocks, (src, dst, num_tokens) each, as if one after another.

    One launch for all layers, unless a copy writes what another one reads or writes.
    """
    device = layers.bases.device
    for group in _independent(copies):
        # From pinned memory, or the host would wait for all that the copying stream has to wait for.
        table = torch.tensor(
            list(zip(*group, strict=True)), dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        copy_all(layers, *table.to(device, non_blocking=True))


def copy_all(layers: Layers, src: Tensor, dst: Tensor, tokens: Tensor) -> None:
    """One launch of copies int64[n] each; none may write what another one reads or writes."""
    _copy(layers, layers.bases, layers.bases, src, dst, tokens, layers.stride, layers.stride)


def block_gather(layers: Layers, blocks: Tensor) -> Tensor:
    """Whole blocks int64[n] of all layers, [n, L, 2, block_size, Hkv, D]: for another tier or replica."""
    shape = (len(blocks), layers.num_layers, 2, *layers.shape)
    staged = torch.empty(shape, dtype=layers.dtype, device=blocks.device)
    if len(blocks):
        bases, order, tokens, stride = _staging(layers, staged)
        _copy(layers, layers.bases, bases, blocks, order, tokens, layers.stride, stride)
    return staged


def block_scatter(layers: Layers, blocks: Tensor, staged: Tensor) -> None:
    """Put what `block_gather` gave (contiguous) into other blocks int64[n]."""
    if len(blocks):
        bases, order, tokens, stride = _staging(layers, staged)
        _copy(layers, bases, layers.bases, order, blocks, tokens, stride, layers.stride)


def _staging(layers: Layers, staged: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Bases of the parts of a staging tensor, its places, tokens of each, bytes from one to the next."""
    count, parts, device = len(staged), 2 * layers.num_layers, staged.device
    bases = staged.data_ptr() + torch.arange(parts, device=device) * layers.block_bytes
    tokens = torch.full((count,), layers.shape[0], dtype=torch.int64, device=device)
    return bases, torch.arange(count, device=device), tokens, parts * layers.block_bytes


def _copy(
    layers: Layers,
    src_bases: Tensor,
    dst_bases: Tensor,
    src: Tensor,
    dst: Tensor,
    tokens: Tensor,
    src_stride: int,
    dst_stride: int,
) -> None:
    align = math.gcd(layers.align, src_stride, dst_stride)
    word = math.gcd(8, align, layers.token_bytes)
    copy_kernel[(len(src), len(src_bases), triton.cdiv(layers.block_bytes // word, TILE))](
        src_bases, dst_bases, src, dst, tokens, src_stride // word, dst_stride // word,
        layers.token_bytes // word, WORD=WORDS[word], ALIGN=align, TILE=TILE, num_warps=4,
    )  # fmt: skip


def _independent(copies: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Runs of copies none of which writes what another one of the run reads or writes."""
    run: list[tuple[int, int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        src, dst, _ = copy
        if src in written or dst in written or dst in read:
            yield run
            run, read, written = [], set(), set()
        run.append(copy)
        read.add(src)
        written.add(dst)
    if run:
        yield run
