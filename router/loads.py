"""How busy, how fast and how full every replica is: its own report, brought up to date by the ledger.

Two sources know the work waiting at a replica. The ledger knows this router's requests exactly, at once. The
replica's `LoadReport` knows everybody's, but as of a moment ago. So that nothing counts twice, *the ledger
speaks for this router and the report speaks for the others*: when a report arrives, what it shows beyond this
router's own queued tokens is the others' work; what it shows less is progress on this router's oldest
request. Requests sent within `transit_s` before the report may or may not be in it; inside that band neither
is assumed.

Work is counted in prompt tokens, but attention makes a token cost more the more context it has: 1 + context /
attention_tokens, as the replica says (`work`). Otherwise long prompts would be taken for half of what they
are. A replica that does not say counts plain tokens.

Between reports work is done at the reported rate, first in first out: the others' part and the oldest own
request shrink with time, and no further, because the requests behind it can't have begun.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from router.ledger import Ledger

Vector = npt.NDArray[np.float64]

DEFAULT_TOKENS_PER_S = 1000.0
"""Prefill rate assumed until any replica has reported one."""

MEASURED_TOKENS = 4096
"""Prompt tokens that a replica must have computed before its own rate is believed. Until then its warm-up,
while others started on the same machine, would decide who gets work, and nothing would ever correct it."""

_FIELDS = ("rate", "token_s", "attention", "others_work", "others_requests", "others_queued", "since",
           "age_s", "free_blocks", "block_share", "sent_blocks", "reported_at", "rate_known",
           "busy_at")  # fmt: skip


class Loads:
    """Vectors by slot, float64[capacity] each. All calls belong to one event loop or thread; none waits."""

    rate: Vector  # prefill, work/s
    token_s: Vector  # 1 / rate
    attention: Vector  # 1 / attention_tokens
    others_work: Vector  # what other routers' requests wait to have computed, at `since`
    others_requests: Vector  # other routers' requests, waiting and running, each of their choices
    others_queued: Vector  # those of them that have not begun
    since: Vector  # clock reading up to which work done is accounted for
    age_s: Vector  # age of the next eviction victim at the report; infinite while nothing needs to be evicted
    free_blocks: Vector  # at the report
    block_share: Vector  # 1 / number of blocks
    sent_blocks: Vector  # blocks that requests placed since the report will take
    reported_at: Vector  # clock reading of the report
    busy_at: Vector  # clock reading when requests were last known to be there
    rate_known: Vector  # 1 where the replica reported its rate, 0 where it is a guess

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, transit_s: float = 0.05) -> None:
        """`transit_s`: seconds within which a request reaches its replica, and a report this router."""
        self._clock = clock
        self._transit_s = transit_s
        self._last_rate = DEFAULT_TOKENS_PER_S
        self._last_attention = 0.0
        self.ledger = Ledger(on_head_change=self._settle)
        for name in _FIELDS:
            setattr(self, name, np.zeros(0))

    def resize(self, capacity: int) -> None:
        """Give every vector this many slots; slots cut off must be unused."""
        for name in _FIELDS:
            new = np.zeros(capacity)
            old = getattr(self, name)[:capacity]
            new[: len(old)] = old
            setattr(self, name, new)
        self.ledger.resize(capacity)

    def join(self, replica_id: str, slot: int) -> None:
        """A replica of which nothing is known yet: idle, empty, as fast as the last one that reported."""
        for name in _FIELDS:
            getattr(self, name)[slot] = 0.0
        self._set_rate(slot, self._last_rate)
        self.attention[slot] = self._last_attention
        self.age_s[slot] = np.inf
        self.busy_at[slot] = -np.inf
        self.since[slot] = self.reported_at[slot] = self._clock()
        self.ledger.join(replica_id, slot)

    def report(self, replica_id: str, slot: int, load: Mapping[str, Any]) -> None:
        """Take in a replica's `LoadReport`, just received."""
        now = self._clock()
        self._learn_speed(slot, load)
        requests = float(load.get("waiting", 0) + load.get("running", 0))
        self.others_requests[slot] = max(0.0, requests - self.ledger.outstanding.item(slot))
        self.others_queued[slot] = max(0.0, load.get("waiting", 0) - self.ledger.queued.item(slot))
        if requests:
            self.busy_at[slot] = now
        self._split(replica_id, slot, float(load.get("waiting_work", load.get("waiting_tokens", 0))), now)
        age_s = load.get("eviction_age_s")
        self.age_s[slot] = np.inf if age_s is None else age_s
        self.free_blocks[slot] = load.get("free", 0)
        self.block_share[slot] = 1.0 / max(1, load.get("num_blocks", 1))
        self.sent_blocks[slot] = 0.0
        self.reported_at[slot] = now

    def sent(self, slot: int, blocks: int, now: float) -> None:
        """A request that needs so many blocks was placed."""
        self.sent_blocks[slot] += blocks
        self.busy_at[slot] = now

    def work(self, hit_tokens: npt.NDArray[np.int64], num_tokens: int) -> Vector:
        """Work at each replica for the rest of a prompt of which it has `hit_tokens`: float64[capacity]."""
        miss = num_tokens - hit_tokens
        work: Vector = miss * (1.0 + (num_tokens - 0.5 * miss) * self.attention)
        return work

    def has_room(self, blocks: Vector) -> npt.NDArray[np.bool_]:
        """Whether so many blocks, float64[capacity], are free at each replica: bool[capacity]."""
        free: npt.NDArray[np.bool_] = self.free_blocks - self.sent_blocks >= blocks
        return free

    def wait_work(self, now: float) -> Vector:
        """What must be computed before a new request's turn comes, float64[capacity]."""
        queued = self.ledger.queued_work + self.others_work
        head = self.ledger.head_work + self.others_work
        return queued - np.minimum((now - self.since) * self.rate, head)

    def requests(self) -> Vector:
        """Choices drawn at each replica for all routers, waiting and running, float64[capacity]."""
        return self.ledger.outstanding + self.others_requests

    def queued(self) -> Vector:
        """Those of them that wait for their first token, float64[capacity]."""
        return self.ledger.queued + self.others_queued

    def victim_ages(self, slots: npt.NDArray[np.intp], blocks: npt.NDArray[np.float64], now: float) -> Vector:
        """How long ago the block was used that the replica would evict next, seconds, for some slots.

        Infinite where `blocks` (needed, per slot) are free. Blocks sent since the report make the victim
        younger in proportion: an LRU's ages run from zero to the victim's over all its blocks.
        """
        free = self.free_blocks.take(slots) - self.sent_blocks.take(slots)
        young = np.minimum(np.maximum(1.0 + free * self.block_share.take(slots), 0.0), 1.0)  # clip is slower
        ages = self.age_s.take(slots) + (now - self.reported_at.take(slots))
        ages *= np.where(np.isinf(ages), 1.0, young)
        return np.where(free >= blocks, np.inf, ages)

    def _learn_speed(self, slot: int, load: Mapping[str, Any]) -> None:
        attention_tokens = load.get("attention_tokens") or 0
        if attention_tokens > 0:
            self.attention[slot] = self._last_attention = 1.0 / attention_tokens
        rate = load.get("prefill_tokens_per_s") or 0.0
        if rate > 0.0:
            if load.get("measured_tokens", MEASURED_TOKENS) >= MEASURED_TOKENS:
                self.rate_known[slot] = 1.0
                self._set_rate(slot, rate)
            if rate != self._last_rate and (self.rate_known[slot] or not self.rate_known.any()):
                self._last_rate = rate
                self._set_rate(self.rate_known == 0.0, rate)

    def _set_rate(self, slot: int | npt.NDArray[np.bool_], rate: float) -> None:
        self.rate[slot] = rate
        self.token_s[slot] = 1.0 / rate

    def _split(self, replica_id: str, slot: int, work: float, now: float) -> None:
        """Tell the others' work, or progress on our own, from a report (the rule in the module docstring)."""
        most = float(self.ledger.queued_work.item(slot))
        self.others_work[slot] = max(0.0, work - most)
        self.since[slot] = now
        if work < most:
            least = self.ledger.queued_before(replica_id, now - self._transit_s)
            self.since[slot] -= max(0.0, least - work) / self.rate[slot]

    def _settle(self, slot: int) -> None:
        """Account for the work done until now, before another request becomes the oldest of ours."""
        now = self._clock()
        done = (now - self.since[slot]) * self.rate[slot]
        self.others_work[slot] = max(0.0, self.others_work[slot] - done)
        self.since[slot] = now
