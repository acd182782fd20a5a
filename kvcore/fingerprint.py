"""What a replica tells routers about its cache: bit flips of a Bloom filter, with a proof of agreement.

A `FingerprintUpdate` carries either a snapshot (all set rows) or a delta (rows set and cleared since
`base_seq`), and the digest of the whole column as it must be afterwards. A router that cannot apply a delta,
or finds another digest, asks for a snapshot. `FingerprintFeed` makes the updates from a cache.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcore.errors import InvalidRequest, WireError
from kvcore.events import BlocksRemoved, BlocksStored, Cleared, Event, EventLog
from kvcore.filters import CountingFilter, FilterGeometry, column_digest, odd_rows
from kvcore.snapshot import Snapshot
from kvcore.wire import pack, take, take_array, take_word, unpack

__all__ = ["CountingFilter", "FilterGeometry", "FingerprintFeed", "FingerprintUpdate", "column_digest"]

logger = logging.getLogger(__name__)

_VERSION = 1
# Rows of flips that a feed remembers at least, so that tiny caches send deltas too.
_MIN_HISTORY = 1024


def _no_rows() -> npt.NDArray[np.uint32]:
    return np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, eq=False)
class FingerprintUpdate:
    """One step of a replica's fingerprint, from sequence number `base_seq` to `seq` of cache epoch `epoch`.

    `set_rows` and `cleared_rows` are uint32[m], distinct and ascending. With `snapshot` the set rows are the
    whole column, nothing is cleared and `base_seq` means nothing. `digest` is `column_digest` of the column
    after the update.
    """

    epoch: int
    base_seq: int
    seq: int
    geometry: FilterGeometry
    snapshot: bool
    set_rows: npt.NDArray[np.uint32]
    digest: int
    cleared_rows: npt.NDArray[np.uint32] = field(default_factory=_no_rows)

    def encode(self) -> bytes:
        """msgpack of the update; a column with many set rows travels as a bitmap, because it is smaller."""
        fields: dict[str, Any] = {
            "epoch": self.epoch,
            "base": self.base_seq,
            "seq": self.seq,
            "rows": self.geometry.rows,
            "k": self.geometry.hashes,
            "snap": self.snapshot,
            "digest": self.digest,
        }
        if self.snapshot and 4 * len(self.set_rows) > self.geometry.rows // 8:
            fields["map"] = _to_bitmap(self.set_rows, self.geometry.rows)
        else:
            fields["set"] = self.set_rows.astype("<u4").tobytes()
            fields["clr"] = self.cleared_rows.astype("<u4").tobytes()
        return pack(_VERSION, **fields)

    @classmethod
    def decode(cls, data: bytes) -> "FingerprintUpdate":
        """The update from bytes of another process. Raises `WireError` for anything that is not one."""
        message = unpack(data, _VERSION)
        try:
            geometry = FilterGeometry(take(message, "rows", int), take(message, "k", int))
        except InvalidRequest as error:
            raise WireError(str(error)) from error
        snapshot = take(message, "snap", bool)
        set_rows, cleared_rows = _read_rows(message, geometry.rows)
        if snapshot and len(cleared_rows):
            raise WireError("a snapshot clears no rows")
        return cls(
            epoch=take_word(message, "epoch"),
            base_seq=take_word(message, "base"),
            seq=take_word(message, "seq"),
            geometry=geometry,
            snapshot=snapshot,
            set_rows=set_rows,
            digest=take_word(message, "digest"),
            cleared_rows=cleared_rows,
        )


def _to_bitmap(rows: npt.NDArray[np.uint32], total: int) -> bytes:
    bits = np.zeros(total, dtype=np.bool_)
    bits[rows] = True
    return np.packbits(bits, bitorder="little").tobytes()


def _read_rows(
    message: dict[str, Any], total: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Set and cleared rows of a message, from either form, checked against the geometry."""
    if "map" in message:
        packed = take_array(message, "map", "<u1")
        if len(packed) != total // 8:
            raise WireError(f"a bitmap of {total} rows has {total // 8} bytes, not {len(packed)}")
        return np.flatnonzero(np.unpackbits(packed, bitorder="little")).astype(np.uint32), _no_rows()
    set_rows, cleared_rows = take_array(message, "set", "<u4"), take_array(message, "clr", "<u4")
    for rows in (set_rows, cleared_rows):
        if len(rows) and (rows[-1] >= total or np.any(rows[1:] <= rows[:-1])):
            raise WireError("rows must be ascending, distinct and inside the filter")
    return set_rows, cleared_rows


class ResidencySource(Protocol):
    """What a feed needs of a cache; `kvcore.cache.PrefixCache` has it."""

    @property
    def events(self) -> EventLog:
        """The cache's event log."""
        ...

    def snapshot(self) -> Snapshot:
        """All resident blocks now."""
        ...


@dataclass(frozen=True, eq=False)
class _Step:
    """Rows that flipped between two sequence numbers: int64[m], ascending and distinct."""

    base_seq: int
    seq: int
    flips: npt.NDArray[np.int64]


class FingerprintFeed:
    """Folds a cache's events into a counting filter and answers each router with what it has missed.

    Work is done when somebody asks, never in the cache's own calls. Steps are kept until their rows would
    weigh more than a snapshot; a router older than that, of another epoch, or at a number no update ended at,
    gets a snapshot. Safe to call from any thread.
    """

    def __init__(self, cache: ResidencySource, geometry: FilterGeometry) -> None:
        self.geometry = geometry
        self._cache = cache
        self._filter = CountingFilter(geometry)
        self._steps: deque[_Step] = deque()
        self._weight = 0
        self._lock = threading.Lock()
        self._seq = 0
        self.rebuilds = 0  # times this feed itself was too slow for the event log

    def update_since(self, epoch: int | None, seq: int) -> FingerprintUpdate | None:
        """What a router at (`epoch`, `seq`) needs to be current; None when it is."""
        with self._lock:
            self._fold()
            if epoch == self._cache.events.epoch and seq == self._seq:
                return None
            flips = self._flips_since(seq) if epoch == self._cache.events.epoch else None
            if flips is None or len(flips) > self.geometry.rows // 32:
                return self._update(0, True, self._filter.set_rows, np.empty(0, dtype=np.int64))
            now_set = self._filter.bits_at(flips)
            return self._update(seq, False, flips[now_set], flips[~now_set])

    def _update(
        self, base_seq: int, snapshot: bool, set_rows: npt.NDArray[np.int64], cleared: npt.NDArray[np.int64]
    ) -> FingerprintUpdate:
        return FingerprintUpdate(
            epoch=self._cache.events.epoch,
            base_seq=base_seq,
            seq=self._seq,
            geometry=self.geometry,
            snapshot=snapshot,
            set_rows=set_rows.astype(np.uint32),
            digest=self._filter.digest,
            cleared_rows=cleared.astype(np.uint32),
        )

    def _fold(self) -> None:
        """Bring the filter to the cache's latest event."""
        log = self._cache.events
        if self._seq == log.seq:
            return
        events = log.since(log.epoch, self._seq)
        if events is None:
            self._rebuild()
            return
        flips = odd_rows(np.concatenate([self._apply(part) for part in _parts(events)]))
        base, self._seq = self._seq, events[-1].seq
        self._steps.append(_Step(base, self._seq, flips))
        self._weight += 1 + len(flips)
        while self._weight > max(self.geometry.rows // 8, _MIN_HISTORY):
            self._weight -= 1 + len(self._steps.popleft().flips)

    def _apply(self, events: list[Event]) -> npt.NDArray[np.int64]:
        """Apply one part of `_parts`; returns the flips it made, in any order."""
        if isinstance(events[0], Cleared):
            return self._filter.clear()
        # Counting everything in before anything out gives the same counts in two calls instead of many.
        stored = [event.hashes for event in events if isinstance(event, BlocksStored)]
        removed = [event.hashes for event in events if isinstance(event, BlocksRemoved)]
        flips = [self._filter.add(np.concatenate(stored))] if stored else []
        if removed:
            flips.append(self._filter.remove(np.concatenate(removed)))
        return np.concatenate(flips)

    def _rebuild(self) -> None:
        """Start again from a snapshot: this feed itself was slower than the log is long."""
        self.rebuilds += 1
        logger.warning("fingerprint feed fell behind the event log: rebuilding from a snapshot")
        snapshot = self._cache.snapshot()
        self._filter.clear()
        self._filter.add(snapshot.hashes)
        self._seq = snapshot.seq
        self._steps.clear()
        self._weight = 0

    def _flips_since(self, seq: int) -> npt.NDArray[np.int64] | None:
        """Net flips after `seq`; None when the steps no longer reach back to it."""
        steps = [step for step in self._steps if step.base_seq >= seq]
        if not steps or steps[0].base_seq != seq:
            return None
        return odd_rows(np.concatenate([step.flips for step in steps]))


def _parts(events: list[Event]) -> Iterator[list[Event]]:
    """Cut a run of events around each `Cleared`, which stands alone."""
    part: list[Event] = []
    for event in events:
        if isinstance(event, Cleared):
            if part:
                yield part
            yield [event]
            part = []
        else:
            part.append(event)
    if part:
        yield part
