"""From prefix hash to published block: a hash table of buckets that are one cache line each.

A bucket has 15 entries, each a block id beside as many bits of the hash as fit into 32, and one word that
counts the entries that belong here but found the bucket full and went on to the next (as in Facebook's F14).
So a look-up reads one line, seldom two, and a block's own facts only if its bits agree; a removal moves
nothing and leaves no tombstone.
"""

import numpy as np

from kvcore.blocks import Pool
from kvcore.jit import jit

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_ENTRIES = 15


def make_slots(num_blocks: int) -> np.ndarray:
    """An empty table for `num_blocks` blocks, three quarters full with all of them: uint32[buckets, 16].

    Word 0 of a bucket is its counter; entries are 0 (empty) or `tag << bits of an id | id + 1`.
    """
    buckets = num_blocks * 4 // (3 * _ENTRIES) + 2
    words = np.zeros(16 * buckets + 16, np.uint32)
    start = -words.ctypes.data % 64 // 4  # buckets begin with a cache line
    return words[start : start + 16 * buckets].reshape(buckets, 16)


@jit
def _place(pool: Pool, key: np.uint64) -> tuple[int, np.uint32]:
    """A key's bucket, and its tag in place; keys need not be random, callers may bring their own."""
    mixed = key * _SPREAD
    bucket = ((mixed >> np.uint64(32)) * np.uint64(pool.slots.shape[0])) >> np.uint64(32)
    return np.int64(bucket), np.uint32(mixed & np.uint64(0xFFFFFFFF)) & ~np.uint32(pool.state[0].id_mask)


@jit
def find(pool: Pool, key: np.uint64) -> int:
    """The published block with this hash, or -1."""
    bucket, tag = _place(pool, key)
    ids = np.uint32(pool.state[0].id_mask)
    for _ in range(pool.slots.shape[0]):
        for i in range(1, 16):
            entry = pool.slots[bucket, i]
            if entry & ~ids == tag and entry & ids != 0:
                block = np.int64(entry & ids) - 1
                if pool.blocks[block].hash == key:
                    return block
        if pool.slots[bucket, 0] == 0:
            break
        bucket = (bucket + 1) % pool.slots.shape[0]
    return -1


@jit
def insert(pool: Pool, block: int) -> None:
    """Enter a block under its hash, which is not in the table."""
    bucket, tag = _place(pool, pool.blocks[block].hash)
    while True:
        for i in range(1, 16):
            if pool.slots[bucket, i] == 0:
                pool.slots[bucket, i] = tag | np.uint32(block + 1)
                return
        pool.slots[bucket, 0] += np.uint32(1)
        bucket = (bucket + 1) % pool.slots.shape[0]


@jit
def remove(pool: Pool, block: int) -> None:
    """Take a block of the table out."""
    bucket, tag = _place(pool, pool.blocks[block].hash)
    while True:
        for i in range(1, 16):
            if pool.slots[bucket, i] == tag | np.uint32(block + 1):
                pool.slots[bucket, i] = 0
                return
        pool.slots[bucket, 0] -= np.uint32(1)
        bucket = (bucket + 1) % pool.slots.shape[0]
