"""Prefix hashes of token blocks, in integer arithmetic modulo 2^64.

The algorithm is the cache core's (see there for what it is good for); its secret constants come as arguments.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]


def prefix_hash(
    tokens: list[npt.NDArray[np.int32]], add: Words, mul: Words, step: int, roots: list[int], mask: int
) -> list[Words]:
    """Hashes of the full blocks of each prompt: int32[n] -> uint64[n // block_size].

    Args:
        tokens: a prompt each; a partial block at its end has no hash.
        add, mul: uint64[block_size], constants of a place in the block.
        step: odd constant that makes order count.
        roots: start value of each prompt's chain.
        mask: kept bits of a hash.
    """
    size, found = len(add), []
    for prompt, root in zip(tokens, roots, strict=True):
        count = len(prompt) // size
        blocks = prompt[: count * size].reshape(count, size).astype(np.int64).astype(np.uint64)
        y = (blocks + add) * mul
        content = (y ^ (y >> np.uint64(29))).sum(1, dtype=np.uint64)
        places = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(step)
        sums = np.cumsum(_mix(content + places), dtype=np.uint64)
        found.append(_mix(sums + np.uint64(root)) & np.uint64(mask))
    return found


def _mix(z: Words) -> Words:
    """The finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
