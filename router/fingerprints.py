"""What every replica holds, approximately: Bloom filters stacked as the columns of one bit matrix.

A replica is one bit column of `uint64[rows, words]`, so a gather of the rows of a prompt's blocks and an AND
along the depth yield the matched depth at *every* replica at once, whatever their number of cached blocks. A
prefix cache is prefix-closed, so a false positive can only lengthen a match by a geometric tail (about 0.02
blocks at 10 bits a block and 4 hashes). Filters of a smaller power of two are tiled into the larger matrix:
their row is the larger row modulo their size.

State is a pure function of what replicas published: `FingerprintUpdate`s with epoch, sequence and a digest
that proves both sides agree. Whatever does not fit is refused, and the caller asks for a snapshot; a column
whose digest disagrees, or whose replica restarted, is wiped at once, so it is never believed warm.
"""

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcore.arrays import plain
from kvcore.filters import row_of
from kvcore.fingerprint import FilterGeometry, FingerprintUpdate, column_digest
from kvcore.jit import jit

_WORD = 64  # replicas per matrix word
_MIN_ROWS = 1024
_MASK64 = (1 << 64) - 1
_NONE, _ONE = np.uint64(0), np.uint64(1)

Words = npt.NDArray[np.uint64]
Depths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ColumnStats:
    """How well one replica's column is known; counters since it joined."""

    epoch: int | None
    seq: int
    set_rows: int
    age_s: float
    """Seconds since the last update that was applied (or since the join)."""
    gaps: int
    """Updates that did not follow the last one: lost, repeated, reordered, another epoch or geometry."""
    mismatches: int
    """Updates whose digest or rows were wrong."""
    snapshots: int


class _Column:
    """One replica's column: where its bits are and what they agree with."""

    __slots__ = ("bit", "digest", "epoch", "gaps", "geometry", "mismatches", "seq", "set_rows", "slot",
                 "snapshots", "updated_at", "word")  # fmt: skip

    def __init__(self, slot: int, now: float) -> None:
        self.slot = slot
        self.word = slot // _WORD
        self.bit = np.uint64(1 << slot % _WORD)
        self.geometry: FilterGeometry | None = None
        self.gaps = self.mismatches = self.snapshots = 0
        self.updated_at = now
        self.forget()

    def forget(self) -> None:
        self.epoch: int | None = None
        self.seq = self.digest = self.set_rows = 0


class Fingerprints:
    """Bit columns of all replicas. A slot (column index) is reused after its replica left.

    All calls belong to one event loop or thread; none waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._columns: dict[str, _Column] = {}
        self._free: list[int] = list(range(_WORD))  # heap: the lowest free slot is taken first
        self._set_matrix(np.zeros((_MIN_ROWS, 1), dtype=np.uint64))
        self._hashes = FilterGeometry(_MIN_ROWS).hashes

    @property
    def capacity(self) -> int:
        """Length of the vector that `match` returns: a multiple of 64."""
        return self._matrix.shape[1] * _WORD

    @property
    def nbytes(self) -> int:
        """Bytes of the bit matrix."""
        return self._matrix.nbytes

    def slot(self, replica_id: str) -> int:
        """The replica's index in match vectors. Raises `KeyError` for an unknown replica."""
        return self._columns[replica_id].slot

    def position(self, replica_id: str) -> tuple[int | None, int]:
        """Epoch and sequence the column agrees with; `(None, 0)` asks for a snapshot."""
        column = self._columns[replica_id]
        return (None, 0) if column.epoch is None else (column.epoch, column.seq)

    def stats(self, replica_id: str) -> ColumnStats:
        """Staleness and repair counters of one replica. Raises `KeyError` for an unknown one."""
        c = self._columns[replica_id]
        age_s = self._clock() - c.updated_at
        return ColumnStats(c.epoch, c.seq, c.set_rows, age_s, c.gaps, c.mismatches, c.snapshots)

    def set_rows(self, replica_id: str) -> npt.NDArray[np.int64]:
        """int64[m]: the rows of the replica's own filter whose bit is set here (reads the whole column)."""
        column = self._columns[replica_id]
        rows = column.geometry.rows if column.geometry else 0
        return np.flatnonzero(self._matrix[:rows, column.word] & column.bit)

    def join(self, replica_id: str) -> int:
        """Give a replica an empty column; returns its slot. Joining twice changes nothing."""
        column = self._columns.get(replica_id)
        if column is None:
            if not self._free:
                first = self.capacity
                self._free = list(range(first, first + _WORD))
                self._set_matrix(np.pad(self._matrix, ((0, 0), (0, 1))))
            column = self._columns[replica_id] = _Column(heapq.heappop(self._free), self._clock())
        return column.slot

    def leave(self, replica_id: str) -> None:
        """Clear the replica's bits and free its slot. An unknown replica is ignored."""
        column = self._columns.pop(replica_id, None)
        if column is None:
            return
        self._clear(column)
        heapq.heappush(self._free, column.slot)
        if column.geometry is not None:
            self._fit()

    def wipe(self, replica_id: str) -> None:
        """Believe the replica cold, and ask for a snapshot."""
        self._clear(self._columns[replica_id])

    def apply(self, replica_id: str, update: FingerprintUpdate) -> bool:
        """Take in what a replica published.

        Returns False when the caller must ask for a snapshot: an unknown replica, a gap (lost, repeated or
        reordered delta, or a snapshot older than the column), another epoch (the column is wiped: the replica
        restarted cold), or wrong rows or digest (wiped as well).
        """
        column = self._columns.get(replica_id)
        if column is None:
            return False
        restarted = column.epoch is not None and column.epoch != update.epoch
        if restarted:
            self._clear(column)
        if update.snapshot:
            outdated = column.epoch == update.epoch and update.seq < column.seq
            return self._gap(column) if outdated else self._apply_snapshot(column, update)
        follows = column.epoch == update.epoch and column.seq == update.base_seq
        if not follows or column.geometry != update.geometry:
            return self._gap(column)
        change = column_digest(update.set_rows) - column_digest(update.cleared_rows)
        if not self._agrees(column, update, column.digest + change):
            return False
        self._write(column, update.set_rows, on=True)
        self._write(column, update.cleared_rows, on=False)
        column.set_rows += len(update.set_rows) - len(update.cleared_rows)
        return True

    def match(self, hashes: npt.NDArray[np.uint64]) -> Depths:
        """Blocks of the prompt that each replica holds, from its first one on: uint64[n] -> int64[capacity].

        Never too low for what was published; too high by a false positive now and then. Unused slots give 0.
        """
        depth = np.zeros(self.capacity, dtype=np.int64)
        if len(hashes):
            alive = np.full(self._matrix.shape[1], _MASK64, dtype=np.uint64)
            _descend(self._matrix, plain(hashes), self._hashes, alive, depth)
        return depth

    def _set_matrix(self, matrix: Words) -> None:
        self._matrix = matrix  # bit `slot % 64` of word [row, slot // 64]

    def _gap(self, column: _Column) -> bool:
        column.gaps += 1
        column.epoch = None  # the bits stay believed until the snapshot; no delta can build on them
        return False

    def _apply_snapshot(self, column: _Column, update: FingerprintUpdate) -> bool:
        self._clear(column)
        if not self._agrees(column, update, column_digest(update.set_rows)):
            return False
        if column.geometry != update.geometry:
            column.geometry = update.geometry
            self._fit()
        self._write(column, update.set_rows, on=True)
        column.set_rows = len(update.set_rows)
        column.snapshots += 1
        return True

    def _agrees(self, column: _Column, update: FingerprintUpdate, digest: int) -> bool:
        """Check rows and digest; note the new position, or wipe the column."""
        limit = update.geometry.rows
        fits = _are_below(limit, update.set_rows) and _are_below(limit, update.cleared_rows)
        if not fits or digest & _MASK64 != update.digest:
            column.mismatches += 1
            self._clear(column)
            return False
        column.epoch, column.seq, column.digest = update.epoch, update.seq, update.digest
        column.updated_at = self._clock()
        return True

    def _write(self, column: _Column, rows: npt.NDArray[np.integer], on: bool) -> None:
        if len(rows) == 0:
            return
        assert column.geometry is not None
        tiles = self._matrix.reshape(-1, column.geometry.rows, self._matrix.shape[1])
        for tile in tiles:
            bits = tile[:, column.word]
            index = rows.astype(np.int64, copy=False)
            bits[index] = bits[index] | column.bit if on else bits[index] & ~column.bit

    def _clear(self, column: _Column) -> None:
        if column.set_rows:  # a column without bits costs nothing: cheap churn
            self._matrix[:, column.word] &= ~column.bit
        column.forget()

    def _fit(self) -> None:
        """Tile or cut the matrix to the largest filter, and use as many hashes as every filter has."""
        known = [c.geometry for c in self._columns.values() if c.geometry is not None]
        rows = max([_MIN_ROWS, *(g.rows for g in known)])
        self._hashes = min((g.hashes for g in known), default=self._hashes)
        words = 1 + max((c.word for c in self._columns.values()), default=0)
        have = len(self._matrix)
        if rows > have:
            self._set_matrix(np.tile(self._matrix, (rows // have, 1)))
        elif rows < have:
            self._set_matrix(self._matrix[:rows].copy())
        if words < self._matrix.shape[1] - 1:  # one spare word, so that churn at an edge does not copy
            self._set_matrix(np.ascontiguousarray(self._matrix[:, : words + 1]))
            self._free = [slot for slot in self._free if slot < self.capacity]
            heapq.heapify(self._free)


def _are_below(limit: int, rows: npt.NDArray[np.uint32]) -> bool:
    return len(rows) == 0 or int(np.maximum.reduce(rows)) < limit


@jit
def _descend(matrix: Words, hashes: Words, per_hash: int, alive: Words, depth: Depths) -> None:
    """How many of the hashes uint64[n] each replica has, from the first one on, into int64[64 * words] zeros.

    `alive`, uint64[words], has a bit for each replica that has everything so far, at first for all; it is
    changed in place. A word without any is not read again.
    """
    words, mask = len(alive), np.uint64(len(matrix) - 1)
    living = words
    for block in range(len(hashes)):
        for word in range(words):
            before = alive[word]
            if before == _NONE:
                continue
            now = before
            for k in range(per_hash):
                now &= matrix[row_of(hashes[block], k, mask), word]
            if now != before:
                _note(before ^ now, block, depth[word * _WORD : (word + 1) * _WORD])
                alive[word] = now
                living -= now == _NONE
        if living == 0:
            return
    for word in range(words):
        _note(alive[word], len(hashes), depth[word * _WORD : (word + 1) * _WORD])


@jit
def _note(replicas: np.uint64, blocks: int, depth: Depths) -> None:
    """These replicas, a bit each, have so many blocks."""
    if blocks > 0:
        for slot in range(_WORD):
            if (replicas >> np.uint64(slot)) & _ONE:
                depth[slot] = blocks
