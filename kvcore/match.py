"""Finding the longest published prefix of a prompt.

Published blocks form one tree per namespace and are prefix-closed: a block is published only below published
blocks, and goes only after its children. So the deepest match is found by binary search over the prefix
hashes. Hashes only propose: parents and tokens of the whole chain are compared, so a collision can cost a hit
and never hands out another prompt's KV.
"""

import numpy as np

from kvcore import index, tree
from kvcore.arrays import BlockIds, Hashes, Tokens
from kvcore.blocks import Pool, same_tokens
from kvcore.jit import jit


@jit
def deepest(pool: Pool, hashes: Hashes) -> int:
    """A depth whose hash is present and the next one's is not; never less than the true match."""
    low, high = 0, len(hashes)
    if high > 0 and index.find(pool, hashes[high - 1]) >= 0:
        return high
    # A follow-up shares nearly all, a stranger nothing: both ends are the likeliest, so 0 is tried early.
    if high > 1 and index.find(pool, hashes[0]) < 0:
        return 0
    high -= 1
    while low < high:
        middle = (low + high + 1) // 2
        if index.find(pool, hashes[middle - 1]) >= 0:
            low = middle
        else:
            high = middle - 1
    return max(low, 0)


@jit
def is_block_of(pool: Pool, block: int, parent: int, tokens: Tokens, start: int) -> bool:
    """Whether a block found by its hash really holds the tokens at `start`, below this parent."""
    return pool.blocks[block].parent == parent and same_tokens(pool, block, tokens, start)


@jit
def _climb(pool: Pool, block: int, depth: int, tokens: Tokens, space: int, table: BlockIds) -> bool:
    """Whether `block` ends the chain that holds the first `depth` blocks of `tokens`; writes the chain."""
    for i in range(depth - 1, -1, -1):
        if block < 0 or not same_tokens(pool, block, tokens, i * pool.tokens.shape[1]):
            return False
        table[i] = block
        block = np.int64(pool.blocks[block].parent)
    return block == -1 - space


@jit
def match(pool: Pool, tokens: Tokens, hashes: Hashes, space: int, table: BlockIds) -> int:
    """The longest published prefix: how many blocks; their ids are written to the front of `table`.

    `hashes` uint64[m] are those of the first m blocks of `tokens`; `table` has room for m ids.
    """
    depth = deepest(pool, hashes)
    if depth == 0 or _climb(pool, index.find(pool, hashes[depth - 1]), depth, tokens, space, table):
        return depth
    parent = -1 - space  # some hash is not what it seems: step by step then
    for i in range(depth):
        block = index.find(pool, hashes[i])
        if block < 0 or not is_block_of(pool, block, parent, tokens, i * pool.tokens.shape[1]):
            return i
        table[i] = block
        parent = block
    return depth


@jit
def find(pool: Pool, tokens: Tokens, hashes: Hashes, space: int, table: BlockIds) -> tuple[int, int, int]:
    """The hit: full blocks (written to `table`), a block to copy from or -1, and how many of its tokens.

    At least the last token is left over. Tokens of a `space` of -1, which nobody uses, hit nothing.
    """
    if space < 0 or space >= len(pool.spaces):  # a probe may know the number of a namespace just entered
        return 0, -1, 0
    most, size = len(tokens) - 1, pool.tokens.shape[1]
    depth = match(pool, tokens, hashes[: most // size], space, table)
    parent = np.int64(table[depth - 1]) if depth > 0 else -1 - space
    source, common = tree.closest(pool, parent, tokens, depth * size, most)
    return depth, source, common
