"""What routers are told of one replica, and when: as the product's long polls bring it.

A change of the cache is told at once, but not more often than every so many seconds; a change of load alone
within `HOLD_S` (as `router.sync` does). What is told is as of then, and heard a delay later. News are made of
what was heard when a router is asked next, of several reports at once: all but the latest load have been
replaced by then, and changes of a cache add up.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore.events import BlocksStored, Cleared, Event
from kvcore.filters import CountingFilter, FilterGeometry
from kvcore.fingerprint import FingerprintUpdate
from router.lab.sim.policies import News
from router.lab.sim.replica import SimReplica
from router.lab.sim.request import SPACE

HOLD_S = 0.5


class Report(NamedTuple):
    """What a replica tells: its load, and what has changed in its cache up to event `seq`, or a snapshot."""

    load: dict[str, Any]
    seq: int
    snapshot: bool

    def replaces(self, earlier: "Report") -> bool:
        """Whether nobody misses an earlier report after this one: routers note when a replica was busy last,
        and a snapshot is not the same as the changes up to it."""
        busy, was_busy = (report.load["waiting"] + report.load["running"] for report in (self, earlier))
        return not self.snapshot and bool(busy or not was_busy)


class Telling:
    """What the routers have been told of one replica's cache. `wants` as in `SimPolicy`."""

    def __init__(self, replica: SimReplica, wants: str, interval_s: float) -> None:
        self._interval_s = interval_s
        self._replica, self._cache, self._wants = replica, replica.cache, wants
        self._filter = CountingFilter(FilterGeometry.for_blocks(replica.cache.num_blocks))
        self._events: list[Event] = []  # told, and not yet in any news
        self._seq = 0  # told up to here
        self._news_seq = 0  # and in news up to here
        self._told_at = -HOLD_S
        self.planned_at = float("inf")

    def due(self) -> float:
        """When something that has changed now is to be told."""
        changed = self._cache.seq != self._seq
        return self._told_at + (self._interval_s if changed else HOLD_S)

    def tell(self, now: float, everything: bool) -> Report:
        """What is to be told now: what has changed since the last call, or all there is."""
        self._told_at, self.planned_at = now, float("inf")
        base, self._seq = self._seq, self._cache.seq
        if self._wants != "load" and base != self._seq:
            self._events += self._changes(base)
        return Report(self._replica.load(), self._seq, everything and self._wants == "fingerprint")

    def news(self, report: Report) -> News:
        """A report that has reached the routers, and all before it that are not yet in any news."""
        base, self._news_seq = self._news_seq, report.seq
        if self._wants == "load" or (base == report.seq and not report.snapshot):
            return News(None, [], report.load)
        events = [event for event in self._events if event.seq <= report.seq]
        self._events = self._events[len(events) :]
        if self._wants == "events":
            return News(None, events, report.load)
        flips = self._filter.follow(events)
        if report.snapshot:
            return News(self._update(0, True, self._filter.set_rows, flips[:0]), events, report.load)
        now_set = self._filter.bits_at(flips)
        return News(self._update(base, False, flips[now_set], flips[~now_set]), events, report.load)

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
            seq=self._news_seq,
            geometry=self._filter.geometry,
            snapshot=snapshot,
            set_rows=rows.astype(np.uint32),
            digest=self._filter.digest,
            cleared_rows=cleared.astype(np.uint32),
        )
