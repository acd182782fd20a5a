"""What changed in a cache, in order: the stream that indexes and fingerprints are built from.

Every event has a sequence number, counted from 1 without gaps within one *epoch* (one life of one cache). A
consumer that applies all events has exactly the residency of the cache. The log keeps a bounded number of
them: a consumer that is too slow sees a gap, takes a snapshot, and goes on from the snapshot's number.
"""

import threading
from collections import deque
from dataclasses import dataclass
from itertools import islice

from kvcore.arrays import Hashes
from kvcore.errors import InvalidRequest


@dataclass(frozen=True, eq=False)
class BlocksStored:
    """A run of blocks became visible: `hashes` uint64[m] in prefix order, the first one below `parent`.

    `parent` is None at the beginning of a prompt. `namespace` is `Namespace.digest()`: no raw salt is here.
    """

    seq: int
    hashes: Hashes
    parent: int | None
    namespace: bytes
    tier: str = "device"


@dataclass(frozen=True, eq=False)
class BlocksRemoved:
    """Blocks are gone: `hashes` uint64[m]; `reason` is "evicted" (children before parents) or "cleared"."""

    seq: int
    hashes: Hashes
    reason: str = "evicted"
    tier: str = "device"


@dataclass(frozen=True, eq=False)
class Cleared:
    """Every block of every namespace is gone."""

    seq: int


Event = BlocksStored | BlocksRemoved | Cleared


@dataclass(frozen=True, eq=False)
class EventBatch:
    """Events after some sequence number up to `seq`, with what a router wants to know beside them.

    `eviction_age_s` is how long the next victim has been idle, in seconds (None: nothing can be evicted), and
    `free_share` the share of blocks, 0..1, that can be taken without evicting anything.
    """

    epoch: int
    seq: int
    events: tuple[Event, ...]
    eviction_age_s: float | None
    free_share: float


class EventLog:
    """The latest events of one epoch, bounded by `capacity`: an event weighs 1 plus its number of hashes.

    Safe to use from several threads; events are immutable and so are their arrays.
    """

    def __init__(self, epoch: int, capacity: int = 65_536) -> None:
        if capacity < 1:
            raise InvalidRequest(f"capacity must be at least 1, not {capacity}")
        self.epoch = epoch
        self.capacity = capacity
        self._events: deque[Event] = deque()
        self._weight = 0
        self._seq = 0
        self._lock = threading.Lock()

    @property
    def seq(self) -> int:
        """Number of the latest event, 0 before the first."""
        return self._seq

    def stored(self, hashes: Hashes, parent: int | None, namespace: bytes) -> None:
        """Append `BlocksStored`; the log owns `hashes` from here on."""
        hashes.setflags(write=False)
        with self._lock:
            self._append(BlocksStored(self._seq + 1, hashes, parent, namespace), len(hashes))

    def removed(self, hashes: Hashes, reason: str) -> None:
        """Append `BlocksRemoved`; the log owns `hashes` from here on."""
        hashes.setflags(write=False)
        with self._lock:
            self._append(BlocksRemoved(self._seq + 1, hashes, reason), len(hashes))

    def cleared(self) -> None:
        """Append `Cleared`."""
        with self._lock:
            self._append(Cleared(self._seq + 1), 0)

    def since(self, epoch: int | None, seq: int) -> list[Event] | None:
        """Events after `seq`, oldest first; None when they are not all here (gap, other epoch, no epoch)."""
        with self._lock:
            if epoch != self.epoch or not self._seq - len(self._events) <= seq <= self._seq:
                return None
            latest = list(islice(reversed(self._events), self._seq - seq))  # however long the log is
            return latest[::-1]

    def _append(self, event: Event, hashes: int) -> None:
        self._seq = event.seq
        self._events.append(event)
        self._weight += 1 + hashes
        while self._weight > self.capacity:
            oldest = self._events.popleft()
            self._weight -= 1 + (0 if isinstance(oldest, Cleared) else len(oldest.hashes))
