"""The published children of each block, sorted by their tokens, for hits that end inside a block.

Siblings form a zip tree (Tarjan, Levy, Timmel, arXiv:1806.06726): a binary search tree that the blocks'
hashes keep balanced, since they are random to everybody without the secret. Nearly every block has at most
one child, which then is a tree of one. Roots are in the parent block, or in the namespace for first blocks.
"""

import numpy as np

from kvcore.arrays import Tokens
from kvcore.blocks import Pool
from kvcore.jit import jit


@jit
def first_child(pool: Pool, parent: int) -> int:
    """Root of the search tree of a parent's children, or -1; a parent is a block or `-1 - space`."""
    return np.int64(pool.blocks[parent].child if parent >= 0 else pool.spaces[-1 - parent].child)


@jit
def closest(pool: Pool, parent: int, wanted: Tokens, start: int, end: int) -> tuple[int, int]:
    """The child that shares most tokens with wanted[start:end], at most a block, and how many; or (-1, 0).

    The nearest ones in the order lie on the search path, so that is all that has to be looked at.
    """
    best, most, block = -1, 0, first_child(pool, parent)
    size = min(end - start, pool.tokens.shape[1])
    while block >= 0 and most < size:
        same = 0
        while same < size and pool.tokens[block, same] == wanted[start + same]:
            same += 1
        if same > most:
            best, most = block, same
        if same == size:
            break
        before = wanted[start + same] < pool.tokens[block, same]
        block = np.int64(pool.blocks[block].left if before else pool.blocks[block].right)
    return best, most


@jit
def _before(pool: Pool, one: int, other: int) -> bool:
    """Whether block `one` sorts before block `other`; siblings are never equal."""
    for i in range(pool.tokens.shape[1]):
        if pool.tokens[one, i] != pool.tokens[other, i]:
            return pool.tokens[one, i] < pool.tokens[other, i]
    return False


@jit
def _hang(pool: Pool, parent: int, above: int, left: bool, block: int) -> None:
    """Put `block` (or -1) below `above` in the tree of siblings, or make it the root if that is -1."""
    if above >= 0 and left:
        pool.blocks[above].left = block
    elif above >= 0:
        pool.blocks[above].right = block
    elif parent >= 0:
        pool.blocks[parent].child = block
    else:
        pool.spaces[-1 - parent].child = block


@jit
def attach(pool: Pool, parent: int, new: int) -> None:
    """Insert a new child below `parent`: descend to its rank, then unzip what is below into two paths."""
    blocks = pool.blocks
    above, left, here = -1, False, first_child(pool, parent)
    while here >= 0 and blocks[here].hash >= blocks[new].hash:
        above, left = here, _before(pool, new, here)
        here = np.int64(blocks[here].left if left else blocks[here].right)
    _hang(pool, parent, above, left, new)
    blocks[new].left = -1
    blocks[new].right = -1
    # `small` and `large` are the lowest nodes of the two paths, to be continued.
    small, large = new, new
    while here >= 0:
        if _before(pool, here, new):
            _hang(pool, parent, small, small == new, here)
            small = here
            here = np.int64(blocks[here].right)
        else:
            _hang(pool, parent, large, large != new, here)
            large = here
            here = np.int64(blocks[here].left)
    if small != new:
        blocks[small].right = -1
    if large != new:
        blocks[large].left = -1


@jit
def detach(pool: Pool, parent: int, gone: int) -> None:
    """Take a child out: find it, then zip its two subtrees into one path."""
    blocks = pool.blocks
    above, left, here = -1, False, first_child(pool, parent)
    while here != gone:
        above, left = here, _before(pool, gone, here)
        here = np.int64(blocks[here].left if left else blocks[here].right)
    small, large = np.int64(blocks[gone].left), np.int64(blocks[gone].right)
    while small >= 0 and large >= 0:
        if blocks[small].hash >= blocks[large].hash:
            _hang(pool, parent, above, left, small)
            above, left, small = small, False, np.int64(blocks[small].right)
        else:
            _hang(pool, parent, above, left, large)
            above, left, large = large, True, np.int64(blocks[large].left)
    _hang(pool, parent, above, left, small if small >= 0 else large)
