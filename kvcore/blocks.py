"""Facts about every block of the pool, in arrays that compiled loops read and write.

A block is FREE (its content means nothing), PRIVATE (held by the sequences that fill it), CACHED (published:
others can hit it, held or idle) or DEAD (was published, then cleared while held: it is freed with its last
holder and nobody new may hit it).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore.errors import InvalidRequest
from kvcore.jit import jit

FREE, PRIVATE, CACHED, DEAD = range(4)
DEFAULT_LEVEL = 35

BlockIds = npt.NDArray[np.int32]

# 48 bytes. Valid for CACHED blocks only: hash, parent, space, child, left, right, used_at, stored_at, uses,
# level. A first block of a prompt has parent `-1 - space`: the root of its namespace.
BLOCK = np.dtype(
    [
        ("hash", np.uint64),
        ("used_at", np.float64),  # clock (s) when the last holder left
        ("stored_at", np.float32),  # seconds since the pool was made
        ("parent", np.int32),
        ("space", np.int32),  # number of its namespace
        ("refs", np.int32),  # holders
        ("child", np.int32),  # root of the search tree of its children, or -1
        ("left", np.int32),  # its place in the search tree of its siblings; `left` also links free blocks
        ("right", np.int32),
        ("uses", np.uint16),  # sequences that stored or hit it, at most 65,535
        ("level", np.uint8),  # priority 0..100
        ("state", np.uint8),
    ],
    align=True,
)
SPACE = np.dtype([("users", np.int64), ("child", np.int32), ("next_unused", np.int32)], align=True)
LEAF = np.dtype([("rank", np.float64), ("block", np.int32), ("level", np.int32)], align=True)
GHOST = np.dtype([("tag", np.uint32), ("evicted_at", np.float32)], align=True)
STATE = np.dtype(
    [
        ("free_head", np.int64),
        ("free", np.int64),
        ("idle", np.int64),  # CACHED without a holder
        ("published", np.int64),
        ("leaves", np.int64),  # entries of the heap, stale ones included
        ("unused_space", np.int64),  # list of namespaces that have just lost their last user
        ("policy", np.int64),
        ("id_mask", np.int64),  # bits of a table entry that are a block id plus 1
        ("started_at", np.float64),
        ("evictions", np.int64),
        ("lifetime_s", np.float64),  # sums over evicted blocks
        ("idle_s", np.float64),
        ("regrets", np.int64),
        ("regret_s", np.float64),
    ],
    align=True,
)


class Pool(NamedTuple):
    """Everything that compiled loops work on; indices are block ids 0..num_blocks-1 unless said otherwise."""

    blocks: np.ndarray  # BLOCK[N]
    tokens: np.ndarray  # int32[N, block_size], of CACHED blocks
    slots: np.ndarray  # uint32[buckets, 16]: the hash table, see `kvcore.index`
    spaces: np.ndarray  # SPACE[namespaces]
    heap: np.ndarray  # LEAF[capacity]: blocks that can be evicted, next victim first
    ghosts: np.ndarray  # GHOST[G]: blocks evicted lately, by hash
    state: np.ndarray  # STATE[1]

    @property
    def nbytes(self) -> int:
        """Host memory of the arrays."""
        return sum(array.nbytes for array in self)


def make_pool(num_blocks: int, block_size: int, slots: np.ndarray, policy: int, now: float) -> Pool:
    """A pool whose blocks are all free, with an empty hash table. Raises `InvalidRequest` for sizes that are out of range."""
    if not 1 <= num_blocks < 1 << 30:
        raise InvalidRequest(f"num_blocks must be 1..2^30-1, not {num_blocks}")
    if block_size < 1:
        raise InvalidRequest(f"block_size must be at least 1, not {block_size}")
    blocks, state = np.zeros(num_blocks, BLOCK), np.zeros(1, STATE)
    blocks["left"][:-1] = np.arange(1, num_blocks)
    blocks["left"][-1] = -1
    state["free"], state["unused_space"] = num_blocks, -1
    state["policy"], state["started_at"] = policy, now
    state["id_mask"] = (1 << num_blocks.bit_length()) - 1
    return Pool(
        blocks=blocks,
        tokens=np.zeros((num_blocks, block_size), np.int32),
        slots=slots,
        spaces=np.zeros(8, SPACE),
        heap=np.zeros(64, LEAF),
        ghosts=np.zeros(num_blocks // 5 + 1, GHOST),
        state=state,
    )


@jit
def take_free(pool: Pool) -> int:
    """The next free block; it becomes PRIVATE with one holder. There must be one."""
    state, block = pool.state[0], pool.state[0].free_head
    state.free_head = pool.blocks[block].left
    state.free -= 1
    pool.blocks[block].state = PRIVATE
    pool.blocks[block].refs = 1
    return block


@jit
def give_free(pool: Pool, block: int) -> None:
    """Give a block back; it is used next."""
    pool.blocks[block].state = FREE
    pool.blocks[block].left = pool.state[0].free_head
    pool.state[0].free_head = block
    pool.state[0].free += 1


@jit
def same_tokens(pool: Pool, block: int, wanted: npt.NDArray[np.int32], start: int) -> bool:
    """Whether a block holds the tokens at `start` of `wanted`, all of them."""
    tokens = pool.tokens[block]
    for i in range(tokens.shape[0]):
        if tokens[i] != wanted[start + i]:
            return False
    return True
