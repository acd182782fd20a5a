"""The Bloom filter behind a fingerprint: its geometry, its digest, and the counting form a replica keeps.

A router keeps one bit per row and replica; the replica keeps counters, because only counters can forget
(Fan, Cao, Almeida, Broder: Summary Cache, SIGCOMM 1998). A prefix cache is prefix-closed, so a false positive
lengthens a predicted hit by a geometric tail only, and 8 to 16 bits a block with 4 hashes are plenty.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcore.errors import InvalidRequest
from kvcore.hashing import splitmix64

_MASK64 = (1 << 64) - 1
_LOW32 = np.uint64(0xFFFFFFFF)
_COUNTER = np.uint16


@dataclass(frozen=True)
class FilterGeometry:
    """Number of rows (a power of two from 8 to 2^31) and of hashes per key (1 to 16)."""

    rows: int
    hashes: int = 4

    def __post_init__(self) -> None:
        if not 8 <= self.rows <= 1 << 31 or self.rows & (self.rows - 1):
            raise InvalidRequest(f"filter rows must be a power of two from 8 to 2^31, not {self.rows}")
        if not 1 <= self.hashes <= 16:
            raise InvalidRequest(f"filter hashes must be 1..16, not {self.hashes}")

    @classmethod
    def for_blocks(cls, num_blocks: int) -> "FilterGeometry":
        """The geometry for a cache of `num_blocks` blocks: at least 8 and less than 16 rows a block."""
        if num_blocks < 1:
            raise InvalidRequest(f"num_blocks must be at least 1, not {num_blocks}")
        return cls(rows=1 << (8 * num_blocks - 1).bit_length())

    def rows_of(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Rows of each key: uint64[n] -> int64[n, K], row k = (lo32 + k * (hi32 | 1)) mod rows.

        Double hashing as in Kirsch and Mitzenmacher, ESA 2006. Rows for a smaller power of two are these rows
        modulo it, so one computation serves filters of several sizes.
        """
        low = (hashes & _LOW32).astype(np.int64)
        high = (hashes >> np.uint64(32)).astype(np.int64) | 1
        rows = np.multiply.outer(high, np.arange(self.hashes, dtype=np.int64))
        rows += low[:, None]
        rows &= self.rows - 1
        return rows


def column_digest(rows: npt.NDArray[np.integer]) -> int:
    """Digest of a set of distinct rows: the sum of splitmix64's finalizer over them, modulo 2^64.

    A sum, so that both sides update it from row flips alone, in any order.
    """
    return int(splitmix64(np.asarray(rows).astype(np.uint64)).sum(dtype=np.uint64))


def odd_rows(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The rows that occur an odd number of times, ascending: the net effect of flips."""
    distinct, counts = np.unique(rows, return_counts=True)
    return distinct[counts & 1 == 1]


class CountingFilter:
    """How many resident keys touch each row. `add`, `remove` and `clear` return the rows that flipped."""

    def __init__(self, geometry: FilterGeometry) -> None:
        self.geometry = geometry
        self.digest = 0  # column_digest of the set rows, kept up to date from flips
        self._counts = np.zeros(geometry.rows, dtype=_COUNTER)

    @property
    def bits(self) -> npt.NDArray[np.bool_]:
        """bool[rows], a new array: true where at least one key touches the row."""
        return self._counts > 0

    def bits_at(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """bool[m]: the bits of the given rows int64[m]."""
        return self._counts[rows] > 0

    @property
    def set_rows(self) -> npt.NDArray[np.int64]:
        """int64[m], ascending: the rows whose bit is set."""
        return np.flatnonzero(self._counts)

    def add(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Count keys uint64[n] in; returns the rows that became set.

        Raises `InvalidRequest`, with nothing changed, if a counter would overflow (a key added 65,535 times).
        """
        rows, counts = np.unique(self.geometry.rows_of(hashes), return_counts=True)
        old = self._counts[rows].astype(np.int64)
        if np.any(old + counts > np.iinfo(_COUNTER).max):
            raise InvalidRequest("a filter counter would overflow: keys must be added once")
        return self._store(rows, old, old + counts)

    def remove(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Count keys uint64[n] out; returns the rows that became clear.

        Raises `InvalidRequest`, with nothing changed, if a key was certainly never added.
        """
        rows, counts = np.unique(self.geometry.rows_of(hashes), return_counts=True)
        old = self._counts[rows].astype(np.int64)
        if np.any(old < counts):
            raise InvalidRequest("a key was removed that is not in the filter")
        return self._store(rows, old, old - counts)

    def clear(self) -> npt.NDArray[np.int64]:
        """Forget every key; returns the rows that were set."""
        flipped = self.set_rows
        self._counts[:] = 0
        self.digest = 0
        return flipped

    def _store(
        self, rows: npt.NDArray[np.int64], old: npt.NDArray[np.int64], new: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        self._counts[rows] = new
        flipped = rows[(old > 0) != (new > 0)]
        change = column_digest(flipped)
        # Either all flips of one call set rows or all clear them, so one sign holds for the whole change.
        grows = len(new) > 0 and bool(new[0] > old[0])
        self.digest = (self.digest + (change if grows else -change)) & _MASK64
        return flipped
