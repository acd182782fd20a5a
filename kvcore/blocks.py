"""Facts about every block of the pool, in arrays: touching or freeing 512 blocks is one numpy operation.

A block is FREE (its content means nothing), PRIVATE (held by the sequence that fills it), CACHED (published:
others can hit it, held or idle) or DEAD (was published, then cleared while held: it is freed with its last
holder and nobody new may hit it).
"""

import numpy as np
import numpy.typing as npt

from kvcore.errors import InvalidRequest

FREE, PRIVATE, CACHED, DEAD = range(4)

# Block ids inside the cache: numpy gathers with its native index type three times as fast as with int32.
BlockIds = npt.NDArray[np.intp]


class BlockPool:
    """Arrays over block ids 0..num_blocks-1, and the stack of free blocks.

    `tokens` int32[N, block_size], `hashes` uint64[N], `parents` int32[N] and `spaces` int32[N] are valid for
    CACHED blocks only. A first block of a prompt has parent `-1 - space`: the root of its namespace.
    `refs` int32[N] counts holders, `last_use` float64[N] is the clock's reading (s) when the last one left.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if not 1 <= num_blocks < 1 << 30:
            raise InvalidRequest(f"num_blocks must be 1..2^30-1, not {num_blocks}")
        if block_size < 1:
            raise InvalidRequest(f"block_size must be at least 1, not {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tokens = np.zeros((num_blocks, block_size), dtype=np.int32)
        self.hashes = np.zeros(num_blocks, dtype=np.uint64)
        self.parents = np.full(num_blocks, -1, dtype=np.int32)
        self.spaces = np.zeros(num_blocks, dtype=np.int32)
        self.refs = np.zeros(num_blocks, dtype=np.int32)
        self.state = np.full(num_blocks, FREE, dtype=np.uint8)
        self.last_use = np.zeros(num_blocks, dtype=np.float64)
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks

    @property
    def nbytes(self) -> int:
        """Host memory of the arrays."""
        arrays = (self.tokens, self.hashes, self.parents, self.spaces, self.refs, self.state, self.last_use)
        return sum(array.nbytes for array in arrays) + self._stack.nbytes

    @property
    def free_ids(self) -> BlockIds:
        """The free blocks, next one to be used first."""
        return self._stack[: self.num_free][::-1].astype(np.intp)

    def pop_free(self, count: int) -> BlockIds:
        """Take `count` free blocks; they become PRIVATE. The caller has made sure that there are enough."""
        left = self.num_free - count
        ids = self._stack[left : self.num_free][::-1].astype(np.intp)
        self.num_free = left
        self.state[ids] = PRIVATE
        return ids

    def push_free(self, ids: BlockIds) -> None:
        """Give blocks back; the last one is used next."""
        self.state[ids] = FREE
        self._stack[self.num_free : self.num_free + len(ids)] = ids
        self.num_free += len(ids)
