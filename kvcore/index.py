"""From prefix hash to block: a hash table in numpy, looked up and changed many keys at a time.

Buckets of four slots, two candidate buckets per key; a new key goes to its first one unless that is nearly
full and the second has more room (after Azar, Broder, Karlin, Upfal: Balanced Allocations, SIAM J. Comput.
1999). No chains and no tombstones, so looking up 512 keys is a handful of array operations, and the table
costs 8 bytes a block. Keys that find both buckets full go to a dictionary: 0.35 % of them in a full pool
after much replacement, by simulation; a flag on their first bucket says when to look there.
"""

import numpy as np
import numpy.typing as npt

from kvcore.blocks import BlockIds

_WIDTH = 4
_ROW_SHIFT = 3  # 2 * _WIDTH slots a key
_LOAD = 0.5
_NEARLY_FULL = 1  # empty slots of a first bucket from which on the second one is considered
_FEW = 8  # up to here a look-up is faster key by key
_SPREAD = 0x9E3779B97F4A7C15  # odd: spreads keys of few bits over all buckets
_MASK64 = (1 << 64) - 1
_LOW32 = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)
# From the pattern of empty slots in a bucket (bit i: slot i is empty) to their number and the first one.
_BITS = np.array([1, 2, 4, 8], dtype=np.uint8)
_EMPTY_COUNT = np.array([bin(pattern).count("1") for pattern in range(16)], dtype=np.int8)
_FIRST_EMPTY = np.array([(pattern & -pattern).bit_length() - 1 for pattern in range(16)], dtype=np.int64)


class HashIndex:
    """Maps the hashes of published blocks to their ids. `hashes` uint64[N] is the pool's array, by block id.

    Keys are distinct: the caller looks a key up before it inserts it.
    """

    def __init__(self, hashes: npt.NDArray[np.uint64]) -> None:
        self._hashes = hashes
        self._hash_of = hashes.data  # a memoryview: scalar reads without making numpy scalars
        self._buckets = int(len(hashes) / (_WIDTH * _LOAD)) + 1
        self._slots = np.full((self._buckets, _WIDTH), -1, dtype=np.int32)
        self._slot = self._slots.reshape(-1).data
        self._stash: dict[int, int] = {}
        self._overflowed = np.zeros(self._buckets, dtype=np.bool_)  # first buckets of stashed keys
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """Host memory of the arrays."""
        return self._slots.nbytes + self._overflowed.nbytes

    def find_one(self, key: int) -> int:
        """Block id of one key, or -1."""
        mixed = key * _SPREAD & _MASK64
        for half in (mixed >> 32, mixed & 0xFFFFFFFF):
            first = (half * self._buckets >> 32) * _WIDTH
            for block in self._slot[first : first + _WIDTH]:
                if block >= 0 and self._hash_of[block] == key:
                    return block
        return self._stash.get(key, -1) if self._stash else -1

    def find(self, keys: npt.NDArray[np.uint64]) -> BlockIds:
        """Block ids intp[n] of keys uint64[n], -1 where a key is absent."""
        if len(keys) <= _FEW:
            return np.array([self.find_one(key) for key in keys.tolist()], dtype=np.intp)
        found = np.full(len(keys), -1, dtype=np.intp)
        places = self._places(keys)
        rows = self._slots.take(places.T, axis=0).reshape(len(keys), 2 * _WIDTH)
        # An empty slot, -1, is clipped and reads block 0's hash, which may be the key.
        hit = np.flatnonzero(self._hashes.take(rows, mode="clip") == keys[:, None])
        ids = rows.reshape(-1).take(hit)
        real = ids >= 0
        if not real.all():
            hit, ids = hit[real], ids[real]
        found[hit >> _ROW_SHIFT] = ids
        if self._stash:
            for i in np.flatnonzero((found < 0) & self._overflowed.take(places[0])).tolist():
                found[i] = self._stash.get(int(keys[i]), -1)
        return found

    def insert(self, ids: BlockIds) -> None:
        """Insert blocks under the hashes that the pool's array has for them."""
        self._length += len(ids)
        places = self._places(self._hashes[ids])
        while len(ids):
            empty = (self._slots.take(places, axis=0) < 0) @ _BITS  # pattern per bucket and key, [2, n]
            count = _EMPTY_COUNT.take(empty)
            second = (count[0] <= _NEARLY_FULL) & (count[1] > count[0])
            pattern = np.where(second, empty[1], empty[0])
            flat = np.where(second, places[1], places[0]) * _WIDTH + _FIRST_EMPTY.take(pattern)
            fits = pattern > 0
            if not fits.all():
                full = ids[~fits]
                self._stash.update(zip(self._hashes[full].tolist(), full.tolist(), strict=True))
                self._overflowed[places[0, ~fits]] = True
                ids, flat, places = ids[fits], flat[fits], places[:, fits]
            slots = self._slots.reshape(-1)
            slots[flat] = ids
            # Two keys of one call may have chosen one slot; the loser tries again.
            lost = slots.take(flat) != ids
            ids, places = ids[lost], places[:, lost]

    def remove(self, ids: BlockIds) -> None:
        """Remove blocks that are in the index."""
        self._length -= len(ids)
        places = self._places(self._hashes[ids])
        hit = np.flatnonzero(self._slots.take(places, axis=0) == ids[:, None])
        row = hit // _WIDTH
        self._slots.reshape(-1)[places.reshape(-1)[row] * _WIDTH + hit % _WIDTH] = -1
        if self._stash:
            stashed = np.ones(len(ids), dtype=np.bool_)
            stashed[row % len(ids)] = False
            for key in self._hashes[ids[stashed]].tolist():
                del self._stash[key]
            if not self._stash:
                self._overflowed[:] = False

    def _places(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """The two candidate buckets of each key, int64[2, n]; the same numbers as in `find_one`."""
        mixed = keys * np.uint64(_SPREAD)
        places = np.empty((2, len(keys)), dtype=np.uint64)
        np.right_shift(mixed, _S32, out=places[0])
        np.bitwise_and(mixed, _LOW32, out=places[1])
        places *= np.uint64(self._buckets)
        places >>= _S32
        return places.view(np.int64)
