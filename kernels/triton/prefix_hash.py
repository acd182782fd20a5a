"""The block hashes of the prefix cache, computed where the tokens are.

Bit for bit what the cache core computes on the host; its secret constants come as arguments. One program
takes one prompt, some blocks at a time, and carries the running sum that chains them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 2048  # tokens a program takes at a time


@triton.jit
def mix(z):
    """The finalizer of splitmix64 on uint64[...]."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def prefix_hash_kernel(
    tokens, token_starts, hash_starts, constants, roots, hashes,
    SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program (prompt). constants int64[2 * SIZE + 2]: what is added, the factors, the step, the mask."""
    prompt = tl.program_id(0)
    first_token, first_hash = tl.load(token_starts + prompt), tl.load(hash_starts + prompt)
    count = (tl.load(hash_starts + prompt + 1) - first_hash).to(tl.int32)
    place = tl.arange(0, PADDED)
    add = tl.load(constants + place, mask=place < SIZE, other=0).to(tl.uint64)
    mul = tl.load(constants + SIZE + place, mask=place < SIZE, other=0).to(tl.uint64)
    step = tl.load(constants + 2 * SIZE).to(tl.uint64)
    mask = tl.load(constants + 2 * SIZE + 1).to(tl.uint64)
    root = tl.load(roots + prompt).to(tl.uint64)
    total = root
    for first in range(0, count, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        live = (block < count)[:, None] & (place < SIZE)[None, :]
        at = first_token + (block.to(tl.int64) * SIZE)[:, None] + place[None, :]
        word = tl.load(tokens + at, mask=live, other=0).to(tl.int64).to(tl.uint64)
        y = (word + add[None, :]) * mul[None, :]
        content = tl.sum(tl.where(live, y ^ (y >> 29), 0), 1)
        links = mix(content + (block + 1).to(tl.uint64) * step)
        links = tl.where(block < count, links, 0)
        found = mix(tl.cumsum(links, 0) + total) & mask
        tl.store(hashes + first_hash + block, found.to(tl.int64), mask=block < count)
        total += tl.sum(links, 0)


def prefix_hash(
    tokens: Tensor, lens: Sequence[int], add: Tensor, mul: Tensor, step: int, roots: Sequence[int], mask: int
) -> Tensor:
    """Hashes of the full blocks of prompts laid end to end: int64[sum of n // block_size], uint64 bit by bit.

    Args:
        tokens: int32[sum of lens] on the device.
        lens: tokens of each prompt.
        add, mul: int64[block_size], the bits of the uint64 constants of a place in the block.
        step, roots, mask: 64-bit integers, the latter two a prompt's start value and the kept bits.
    """
    size = len(add)
    ends = np.cumsum([0, *lens]), np.cumsum([0, *(n // size for n in lens)])
    token_starts, hash_starts = (torch.from_numpy(end).to(tokens.device) for end in ends)
    hashes = torch.empty(int(ends[1][-1]), dtype=torch.int64, device=tokens.device)
    if len(hashes):
        padded = triton.next_power_of_2(size)
        constants = torch.cat([add.to(tokens.device), mul.to(tokens.device), _words([step, mask], tokens)])
        prefix_hash_kernel[(len(lens),)](
            tokens, token_starts, hash_starts, constants, _words(roots, tokens), hashes,
            SIZE=size, PADDED=padded, BLOCKS=max(1, TOKENS // padded), num_warps=4,
        )  # fmt: skip
    return hashes


def _words(values: Sequence[int], like: Tensor) -> Tensor:
    """64-bit integers as int64[n] of the same bits."""
    return torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64)).to(like.device)
