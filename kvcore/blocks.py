"""Facts about every block of the pool, in arrays that compiled loops read and write.

A block is FREE (its content means nothing), PRIVATE (held by the sequences that fill it), CACHED (published:
others can hit it, held or idle) or DEAD (was published, then cleared while held: it is freed with its last
holder and nobody new may hit it).
"""

from typing import NamedTuple

import numpy as np

from kvcore.arrays import Tokens
from kvcore.errors import InvalidRequest
from kvcore.jit import jit

FREE, PRIVATE, CACHED, DEAD = range(4)
DEFAULT_LEVEL = 35

# 40 bytes. Valid for CACHED blocks only: hash, used_at, parent, child, left, right, uses, level. A first
# block of a prompt has parent `-1 - space`: the root of its namespace.
BLOCK = np.dtype(
    [
        ("hash", np.uint64),
        ("used_at", np.float64),  # clock (s) when the last holder left
        ("parent", np.int32),
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
HABIT = np.dtype(
    [
        ("leaves", np.int64),  # entries of the class's heap, stale ones included
        ("uses", np.float64),  # uses that made blocks members of this class
        ("again", np.float64),  # those that another use followed
        ("bonus", np.float64),  # seconds by which members count as used later than they were
    ],
    align=True,
)
GHOST = np.dtype([("tag", np.uint32), ("evicted_at", np.float32)], align=True)
STATE = np.dtype(
    [
        ("free_head", np.int64),
        ("free", np.int64),
        ("idle", np.int64),  # CACHED without a holder
        ("published", np.int64),
        ("unused_space", np.int64),  # list of namespaces that have just lost their last user
        ("policy", np.int64),
        ("id_mask", np.int64),  # bits of a table entry that are a block id plus 1
        ("started_at", np.float64),
        ("evictions", np.int64),
        ("idle_s", np.float64),  # sum over evicted blocks
        ("regrets", np.int64),
        ("regret_s", np.float64),
        ("gap_s", np.float64),  # sums over the idle times that ended in another use, of them ...
        ("gap_s2", np.float64),  # ... and of their squares
        ("age_s", np.float64),  # idle time of victims, smoothed
        ("published_at", np.float64),  # when `published` changed last
        ("block_seconds", np.float64),  # time that blocks have been published, summed, up to then
    ],
    align=True,
)
CLASSES = 3


class Pool(NamedTuple):
    """Everything that compiled loops work on; indices are block ids 0..num_blocks-1 unless said otherwise."""

    blocks: np.ndarray  # BLOCK[N]
    tokens: np.ndarray  # int32[N, block_size], of CACHED blocks
    slots: np.ndarray  # uint32[buckets, 16]: the hash table, see `kvcore.index`
    spaces: np.ndarray  # SPACE[namespaces]
    heaps: np.ndarray  # LEAF[CLASSES, capacity]: blocks that can be evicted, next victim first
    habits: np.ndarray  # HABIT[CLASSES]: how often blocks of a class are used again
    ghosts: np.ndarray  # GHOST[sets, 4]: blocks evicted lately, by hash
    state: np.ndarray  # STATE[1]

    @property
    def nbytes(self) -> int:
        """Host memory of the arrays."""
        return sum(array.nbytes for array in self)


def check_sizes(num_blocks: int, block_size: int) -> None:
    """Raise `InvalidRequest` for a pool that there cannot be."""
    if not 1 <= num_blocks < 1 << 30:
        raise InvalidRequest(f"num_blocks must be 1..2^30-1, not {num_blocks}")
    if block_size < 1:
        raise InvalidRequest(f"block_size must be at least 1, not {block_size}")


def make_pool(num_blocks: int, block_size: int, slots: np.ndarray, policy: int, now: float) -> Pool:
    """A pool of checked sizes whose blocks are all free, with an empty hash table."""
    blocks, state = np.zeros(num_blocks, BLOCK), np.zeros(1, STATE)
    blocks["left"][:-1] = np.arange(1, num_blocks)
    blocks["left"][-1] = -1
    state["free"], state["unused_space"] = num_blocks, -1
    state["policy"], state["started_at"] = policy, now
    state["published_at"] = now
    state["id_mask"] = (1 << num_blocks.bit_length()) - 1
    return Pool(
        blocks=blocks,
        tokens=np.zeros((num_blocks, block_size), np.int32),
        slots=slots,
        spaces=np.zeros(8, SPACE),
        heaps=np.zeros((CLASSES, 64), LEAF),
        habits=np.zeros(CLASSES, HABIT),
        ghosts=np.zeros((_num_ghosts(num_blocks, block_size) // 4 + 1, 4), GHOST),
        state=state,
    )


def _num_ghosts(num_blocks: int, block_size: int) -> int:
    """Two ghosts a block, and no more than a sixteenth of the memory of the blocks themselves."""
    size = BLOCK.itemsize + 4 * block_size
    return min(2 * num_blocks, num_blocks * size // (16 * GHOST.itemsize))


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
def same_tokens(pool: Pool, block: int, wanted: Tokens, start: int) -> bool:
    """Whether a block holds the tokens at `start` of `wanted`, all of them."""
    tokens = pool.tokens[block]
    for i in range(len(tokens)):  # noqa: SIM110 - numba compiles no generators
        if tokens[i] != wanted[start + i]:
            return False
    return True
