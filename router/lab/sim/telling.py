"""What routers are told of one replica, and when: as the product's long polls bring it.

A change of the cache is told at once, but not more often than every so many seconds; a change of load alone
within `HOLD_S` (as `router.sync` does). What is told is as of then, and heard a delay later.
"""

import numpy as np
import numpy.typing as npt

from kvcore.events import BlocksStored, Cleared, Event
from kvcore.filters import CountingFilter, FilterGeometry
from kvcore.fingerprint import FingerprintUpdate
from router.lab.sim.policies import News
from router.lab.sim.replica import SimReplica
from router.lab.sim.request import SPACE

HOLD_S = 0.5


class Telling:
    """What the routers have been told of one replica's cache. `wants` as in `SimPolicy`."""

    def __init__(self, replica: SimReplica, wants: str, interval_s: float) -> None:
        self._interval_s = interval_s
        self._replica, self._cache, self._wants = replica, replica.cache, wants
        self._filter = CountingFilter(FilterGeometry.for_blocks(replica.cache.num_blocks))
        self._seq = 0
        self._told_at = -HOLD_S
        self.planned_at = float("inf")

    def due(self) -> float:
        """When something that has changed now is to be told."""
        changed = self._cache.seq != self._seq
        return self._told_at + (self._interval_s if changed else HOLD_S)

    def news(self, now: float, everything: bool) -> News:
        """What has changed since the last call, or all there is."""
        self._told_at, self.planned_at = now, float("inf")
        base, self._seq = self._seq, self._cache.seq
        load = self._replica.load()
        if self._wants == "load" or (base == self._seq and not everything):
            return News(None, [], load)
        events = self._changes(base)
        if self._wants == "events":
            return News(None, events, load)
        flips = self._filter.follow(events)
        if everything:
            return News(self._update(0, True, self._filter.set_rows, flips[:0]), events, load)
        now_set = self._filter.bits_at(flips)
        return News(self._update(base, False, flips[now_set], flips[~now_set]), events, load)

    def _changes(self, base: int) -> list[Event]:
        events = self._cache.events.since(self._cache.epoch, base)
        if events is None:  # more than the log holds: all from the beginning
            everything = self._cache.snapshot()
            return [Cleared(self._seq), BlocksStored(self._seq, everything.hashes, None, SPACE.digest())]
        return events

    def _update(
        self, base: int, snapshot: bool, rows: npt.NDArray[np.int64], cleared: npt.NDArray[np.int64]
    ) -> FingerprintUpdate:
        return FingerprintUpdate(
            epoch=self._cache.epoch,
            base_seq=base,
            seq=self._seq,
            geometry=self._filter.geometry,
            snapshot=snapshot,
            set_rows=rows.astype(np.uint32),
            digest=self._filter.digest,
            cleared_rows=cleared.astype(np.uint32),
        )
