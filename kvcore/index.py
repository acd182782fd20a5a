"""From prefix hash to published block: an open hash table with linear probing over the pool's arrays.

The table holds block ids only; the keys are the blocks' own hashes. Removal moves later entries of the run
back (Knuth, TAOCP 3, 6.4, algorithm R), so there are no tombstones and no rebuilds.
"""

import numpy as np

from kvcore.blocks import Pool
from kvcore.jit import jit

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_S32 = np.uint64(32)


@jit
def _home(pool: Pool, key: np.uint64) -> int:
    """Where a key's run begins; keys need not be random, callers may bring their own."""
    mixed = (key * _SPREAD) >> _S32
    return np.int64((mixed * np.uint64(pool.slots.shape[0])) >> _S32)


@jit
def find(pool: Pool, key: np.uint64) -> int:
    """The published block with this hash, or -1."""
    slot = _home(pool, key)
    while pool.slots[slot] >= 0:
        if pool.blocks[pool.slots[slot]].hash == key:
            return np.int64(pool.slots[slot])
        slot += 1
        if slot == pool.slots.shape[0]:
            slot = 0
    return -1


@jit
def insert(pool: Pool, block: int) -> None:
    """Enter a block under its hash, which is not in the table."""
    slot = _home(pool, pool.blocks[block].hash)
    while pool.slots[slot] >= 0:
        slot += 1
        if slot == pool.slots.shape[0]:
            slot = 0
    pool.slots[slot] = block


@jit
def remove(pool: Pool, block: int) -> None:
    """Take a block of the table out."""
    size = pool.slots.shape[0]
    hole = _home(pool, pool.blocks[block].hash)
    while pool.slots[hole] != block:
        hole = hole + 1 if hole + 1 < size else 0
    slot = hole
    while True:
        slot = slot + 1 if slot + 1 < size else 0
        if pool.slots[slot] < 0:
            break
        home = _home(pool, pool.blocks[pool.slots[slot]].hash)
        # The entry may fill the hole unless its home lies cyclically behind the hole.
        if (slot - home) % size >= (slot - hole) % size:
            pool.slots[hole] = pool.slots[slot]
            hole = slot
    pool.slots[hole] = -1
