"""From a cache's events to what each router has missed: the replica's side of fingerprints."""

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcore.events import EventLog
from kvcore.filters import CountingFilter, FilterGeometry, odd_rows
from kvcore.fingerprint import FingerprintUpdate
from kvcore.snapshot import Snapshot

logger = logging.getLogger(__name__)

# Rows of flips that a feed remembers at least, so that tiny caches send deltas too.
_MIN_HISTORY = 1024


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
        flips = self._filter.follow(events)
        base, self._seq = self._seq, events[-1].seq
        self._steps.append(_Step(base, self._seq, flips))
        self._weight += 1 + len(flips)
        while self._weight > max(self.geometry.rows // 8, _MIN_HISTORY):
            self._weight -= 1 + len(self._steps.popleft().flips)

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
