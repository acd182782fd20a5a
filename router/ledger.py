"""What this router sent and has not got back: exact figures for every replica, and the prompts in flight.

Work is prompt tokens to be computed, each counted with what attention to its context costs (`Loads.work`).

A request is *queued* from its reservation to its first token and *running* from then to its end. It draws one
or more *choices* at the same time, which share the computing of the prompt but not the decoding. Figures are
integers that every ending undoes exactly, so an idle router shows exact zeros whatever happened before. A
replica that is dropped takes its figures along; endings that arrive later change nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from router.inflight import Entry, InFlight

Figures = npt.NDArray[np.int64]
_QUEUED, _RUNNING, _DONE = "queued", "running", "done"


class Reservation:
    """One request at one replica, from the decision to its end.

    `predicted_tokens` is the hit that was expected, `cached_tokens` the one the replica reported (None before
    the first token); both are tokens, like `num_tokens`, the length of the prompt.
    """

    __slots__ = ("_account", "_entry", "cached_tokens", "choices", "num_tokens", "predicted_tokens",
                 "reserved_at", "state", "work")  # fmt: skip

    def __init__(
        self,
        account: "_Account",
        num_tokens: int,
        predicted_tokens: int,
        now: float,
        choices: int,
        work: int,
    ) -> None:
        self._account: _Account | None = account
        self._entry: Entry | None = None
        self.num_tokens = num_tokens
        self.predicted_tokens = predicted_tokens
        self.cached_tokens: int | None = None
        self.choices = choices
        self.reserved_at = now
        self.work = work
        self.state = _QUEUED

    @property
    def replica_id(self) -> str | None:
        """Where the request is; None once it ended or its replica was dropped."""
        return self._account.replica_id if self._account else None

    @property
    def in_overlay(self) -> bool:
        """Whether its prompt is in the overlay: on its way, or computed but not yet known to be stored."""
        return self._entry is not None and self._entry.row >= 0

    @property
    def miss_tokens(self) -> int:
        """Prompt tokens that the replica was expected to compute."""
        return self.num_tokens - self.predicted_tokens


class _Account:
    """One replica's reservations, the queued ones oldest first."""

    __slots__ = ("queued", "replica_id", "running", "slot", "unstored")

    def __init__(self, replica_id: str, slot: int) -> None:
        self.replica_id = replica_id
        self.slot = slot
        self.queued: dict[Reservation, None] = {}
        self.running: set[Reservation] = set()
        self.unstored: set[Entry] = set()  # prompts computed there that its fingerprint does not yet show


@dataclass(frozen=True)
class LedgerStats:
    """One replica's figures; all exactly zero when nothing of this router is there."""

    queued_requests: int
    running_requests: int
    queued_tokens: int
    """Prompt tokens that queued requests still have to compute there."""
    running_tokens: int
    """Prompt tokens of running requests, once for each of their choices: the decode load."""
    in_flight_prompts: int
    """Prompts of these requests in the overlay: not yet known to be stored."""
    choices: int
    """Answers that the requests draw, queued and running: what a replica counts, too."""


class Ledger:
    """Reservations of this router by replica. All calls belong to one event loop; none waits."""

    def __init__(self, on_head_change: Callable[[int], None] | None = None) -> None:
        """`on_head_change(slot)` is called just before another request becomes the oldest queued there."""
        self._accounts: dict[str, _Account] = {}
        self._on_head_change = on_head_change or (lambda slot: None)
        self.in_flight = InFlight()
        self.queued_tokens: Figures = np.zeros(0, dtype=np.int64)  # these six are int64[capacity], by slot
        self.queued_work: Figures = np.zeros(0, dtype=np.int64)
        self.head_work: Figures = np.zeros(0, dtype=np.int64)  # part of queued_work: the oldest request's
        self.outstanding: Figures = np.zeros(0, dtype=np.int64)  # choices, queued and running
        self.queued: Figures = np.zeros(0, dtype=np.int64)  # those of them that are queued
        self.running_tokens: Figures = np.zeros(0, dtype=np.int64)

    def resize(self, capacity: int) -> None:
        """Give the figures this many slots; slots cut off must be unused."""
        for name in ("queued_tokens", "queued_work", "head_work", "outstanding", "queued", "running_tokens"):
            old = getattr(self, name)
            new = np.zeros(capacity, dtype=np.int64)
            new[: len(old)] = old[:capacity]
            setattr(self, name, new)

    def join(self, replica_id: str, slot: int) -> None:
        """Open the books of a replica."""
        if slot >= len(self.outstanding):
            self.resize(slot + 1)
        self._accounts[replica_id] = _Account(replica_id, slot)

    def drop_replica(self, replica_id: str) -> None:
        """Forget a replica and everything at it. An unknown one is ignored."""
        account = self._accounts.get(replica_id)
        if account is None:
            return
        for reservation in [*account.queued, *account.running]:
            self.finish(reservation)
        for entry in account.unstored:
            self.in_flight.remove(entry)
        del self._accounts[replica_id]

    def reserve(
        self,
        replica_id: str,
        hashes: npt.NDArray[np.uint64] | None,
        num_tokens: int,
        predicted_tokens: int,
        now: float = 0.0,
        choices: int = 1,
        work: int | None = None,
    ) -> Reservation:
        """Note a request that is sent to a replica.

        Args:
            replica_id: a replica that joined (`KeyError` otherwise).
            hashes: the prompt's prefix hashes for the overlay, uint64[n]; None or empty keeps it out of it.
            num_tokens: length of the prompt; predicted_tokens: the part expected to be cached there.
            now: the caller's clock, seconds.
            choices: answers that are drawn at the same time, those that the client never sees included.
            work: what computing the rest of the prompt costs; by default its tokens.
        """
        account = self._accounts[replica_id]
        missing = num_tokens - predicted_tokens
        work = missing if work is None else work
        reservation = Reservation(account, num_tokens, predicted_tokens, now, choices, work)
        if not account.queued:
            self._on_head_change(account.slot)
            self.head_work[account.slot] = work
        account.queued[reservation] = None
        self.queued_tokens[account.slot] += missing
        self.queued_work[account.slot] += work
        self.outstanding[account.slot] += choices
        self.queued[account.slot] += choices
        if hashes is not None and len(hashes):
            reservation._entry = self.in_flight.add(account.slot, hashes)
        return reservation

    def start(
        self, reservation: Reservation, replica_id: str, cached_tokens: int, epoch: int | None, seq: int
    ) -> None:
        """The first token came, from `replica_id`; if that is another than planned, the figures move there.

        `epoch` and `seq` are the cache's after the prompt was stored; the overlay keeps the prompt until the
        replica's fingerprint got there (see `stored`). Repeated calls and calls after the end change nothing.
        """
        if reservation.state != _QUEUED:
            return
        reservation.cached_tokens = cached_tokens
        self._leave_queue(reservation)
        account = self._accounts.get(replica_id)
        if account is None:
            self._close(reservation)
            return
        if reservation._account is not account and reservation._entry is not None:
            self.in_flight.move(reservation._entry, account.slot)
        reservation._account = account
        reservation.state = _RUNNING
        account.running.add(reservation)
        self.outstanding[account.slot] += reservation.choices
        self.running_tokens[account.slot] += reservation.choices * reservation.num_tokens
        if reservation._entry is not None:
            reservation._entry.epoch, reservation._entry.seq = epoch, seq
            account.unstored.add(reservation._entry)

    def finish(self, reservation: Reservation, keep: bool = True) -> None:
        """The request is over, however it ended. Idempotent.

        A prompt that was computed stays in the overlay until the fingerprint shows it (see `stored`), unless
        `keep` is False, because there is no fingerprint.
        """
        account = reservation._account
        if reservation.state == _QUEUED:
            self._leave_queue(reservation)
        elif reservation.state == _RUNNING:
            assert account is not None
            account.running.discard(reservation)
            self.outstanding[account.slot] -= reservation.choices
            self.running_tokens[account.slot] -= reservation.choices * reservation.num_tokens
            if not keep and reservation._entry is not None:
                account.unstored.discard(reservation._entry)
        self._close(reservation)

    def stored(self, replica_id: str, epoch: int | None, seq: int) -> None:
        """The replica's fingerprint stands at `epoch`, `seq`: prompts it contains leave the overlay.

        So do prompts that were stored in another epoch: the replica lost them.
        """
        account = self._accounts.get(replica_id)
        if account is None:
            return
        for entry in tuple(account.unstored):
            if entry.epoch != epoch or entry.seq <= seq:
                self.in_flight.remove(entry)
                account.unstored.discard(entry)

    def queued_before(self, replica_id: str, moment: float) -> int:
        """Work of the requests reserved before `moment` and still queued."""
        account = self._accounts[replica_id]
        later = takewhile(lambda r: r.reserved_at >= moment, reversed(account.queued))  # oldest come first
        return int(self.queued_work[account.slot]) - sum(r.work for r in later)

    def stats(self, replica_id: str) -> LedgerStats:
        """Figures of one replica. Raises `KeyError` for an unknown one."""
        account = self._accounts[replica_id]
        slot = account.slot
        return LedgerStats(
            queued_requests=len(account.queued),
            running_requests=len(account.running),
            queued_tokens=int(self.queued_tokens[slot]),
            running_tokens=int(self.running_tokens[slot]),
            in_flight_prompts=sum(r.in_overlay for r in [*account.queued, *account.running]),
            choices=int(self.outstanding[slot]),
        )

    def _leave_queue(self, reservation: Reservation) -> None:
        account = reservation._account
        assert account is not None
        if next(iter(account.queued)) is reservation:
            self._on_head_change(account.slot)
            del account.queued[reservation]
            head = next(iter(account.queued), None)
            self.head_work[account.slot] = head.work if head else 0
        else:
            del account.queued[reservation]
        self.queued_tokens[account.slot] -= reservation.miss_tokens
        self.queued_work[account.slot] -= reservation.work
        self.outstanding[account.slot] -= reservation.choices
        self.queued[account.slot] -= reservation.choices

    def _close(self, reservation: Reservation) -> None:
        entry, account = reservation._entry, reservation._account
        if entry is not None and (account is None or entry not in account.unstored):
            self.in_flight.remove(entry)
        reservation._entry = None
        reservation._account = None
        reservation.state = _DONE
