"""Keeps `Placement` true: one long poll per replica carries cache changes and load to this router.

Every router pulls for itself, so a router's state is a function of what the replicas published. A replica
joins placement with its first answer (a full snapshot). When Serve drops it, it leaves, and what it still
answers goes on: it may be shutting down in good order. A failed poll means more: the replica is lost, and so
are the requests there. While Serve still lists it, the poll is tried again, and a replica that comes back is
cold until its snapshot arrives.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcore.errors import WireError
from kvcore.fingerprint import FingerprintUpdate
from router.errors import ReplicaLost, RouterError, UpstreamError
from router.membership import Membership
from router.placement import Placement
from router.ray_router import ServeTransport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncSettings:
    """Times of the long poll, in seconds."""

    hold_s: float = 0.5
    """How long a replica may hold a poll when its cache does not change; its load is at most this old."""
    grace_s: float = 5.0
    """How long after `hold_s` a silent replica counts as lost. It answers polls while the model computes."""
    late_s: float = 1.0
    """A poll that times out so much too late tells of this process, which was held up, not of the replica."""
    min_interval_s: float = 0.05
    """Pause between two polls of one replica; bounds the cost of a busy replica's stream of changes."""
    retry_min_s: float = 0.1
    retry_max_s: float = 2.0
    """Pause after a failed poll: doubles from `retry_min_s` to `retry_max_s`, with jitter."""


class FleetSync:
    """Follows every replica of a deployment. Runs on the router's event loop, like `Placement` itself."""

    def __init__(
        self,
        transport: ServeTransport,
        placement: Placement,
        members: Membership,
        on_model: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str], None],
        settings: SyncSettings | None = None,
    ) -> None:
        """`on_model` hears what each replica says about its model: digest, layout, block size, context.

        `on_lost` hears of each failed poll, and must make the replica leave `placement`.
        """
        self._transport = transport
        self._placement = placement
        self._members = members
        self._on_model = on_model
        self._on_lost = on_lost
        self._settings = settings or SyncSettings()
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._stop_watch: Callable[[], None] | None = None
        self._connector: asyncio.Task[None] | None = None
        self.ready = asyncio.Event()
        """Set with the first replica that answered."""

    def start(self) -> None:
        """Begin to follow; returns at once."""
        self._stop_watch = self._members.watch(self._on_members)
        self._connector = asyncio.create_task(self._connect())

    async def stop(self) -> None:
        """End every poll."""
        if self._stop_watch is not None:
            self._stop_watch()
        tasks = [*self._followers.values(), *([self._connector] if self._connector else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self) -> None:
        # Serve builds its request router, and with it the membership, at the first call through the handle.
        while not self._members.ids:
            with contextlib.suppress(UpstreamError):
                await self._transport.connect(timeout_s=30.0)
            await asyncio.sleep(self._settings.retry_min_s)

    def _on_members(self, ids: frozenset[str]) -> None:
        for replica_id in self._followers.keys() - ids:
            self._followers.pop(replica_id).cancel()
            self._placement.leave(replica_id)
        for replica_id in ids - self._followers.keys():
            self._followers[replica_id] = asyncio.create_task(self._follow(replica_id))

    async def _follow(self, replica_id: str) -> None:
        follower = _Follower(replica_id, self._settings)
        while True:
            started = time.monotonic()
            try:
                self._apply(follower, await self._poll(follower))
            except (RouterError, WireError, KeyError, TypeError, ValueError) as error:  # lost, or nonsense
                if time.monotonic() - started < follower.timeout_s + self._settings.late_s:
                    logger.warning("no word from replica %s: %s", replica_id, error)
                    self._on_lost(replica_id)
                    await asyncio.sleep(follower.failed())
                    continue
            spare = self._settings.min_interval_s - (time.monotonic() - started)
            await asyncio.sleep(max(0.0, spare))

    async def _poll(self, follower: "_Follower") -> dict[str, Any]:
        # A task of its own, so that a cancellation from below is told from one of the follower itself.
        replica_id = follower.replica_id
        call = self._transport.poll(replica_id, follower.request(), follower.timeout_s)
        poll = asyncio.create_task(call)
        try:
            await asyncio.wait({poll})
        finally:
            poll.cancel()
        if poll.cancelled():
            raise ReplicaLost(replica_id, "the poll was cancelled")
        return poll.result()

    def _apply(self, follower: "_Follower", answer: dict[str, Any]) -> None:
        update = None if answer["update"] is None else FingerprintUpdate.decode(answer["update"])
        if not follower.joined:
            self._on_model(answer["model"])
            self._placement.join(follower.replica_id)
        applied = self._placement.update(follower.replica_id, update, answer["load"])
        follower.answered(update, applied)
        if self._placement.needs_resync(follower.replica_id):
            follower.forget()
        self.ready.set()


class _Follower:
    """Where one replica's stream of changes stands."""

    def __init__(self, replica_id: str, settings: SyncSettings) -> None:
        self.replica_id = replica_id
        self.joined = False
        self._settings = settings
        self._failures = 0
        self.forget()

    @property
    def timeout_s(self) -> float:
        """How long to wait for the next answer."""
        return (self._settings.hold_s if self.joined else 0.0) + self._settings.grace_s

    def forget(self) -> None:
        """Ask for a snapshot next."""
        self._epoch: int | None = None
        self._seq = 0

    def request(self) -> dict[str, Any]:
        """The next poll. The first one is answered at once: nothing is known yet."""
        hold_s = self._settings.hold_s if self.joined else 0.0
        return {"v": 1, "epoch": self._epoch, "seq": self._seq, "timeout_s": hold_s}

    def answered(self, update: FingerprintUpdate | None, applied: bool) -> None:
        """Note an answer; a change that could not be applied asks for a snapshot next."""
        self.joined, self._failures = True, 0
        if update is None:
            return
        if applied:
            self._epoch, self._seq = update.epoch, update.seq
        else:
            self.forget()

    def failed(self) -> float:
        """Note a failed poll. Returns the pause in seconds before the next."""
        self.joined = False
        self.forget()
        pause = min(self._settings.retry_max_s, self._settings.retry_min_s * 2**self._failures)
        self._failures = min(self._failures + 1, 16)
        return pause * random.uniform(0.5, 1.0)
