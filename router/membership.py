"""Which replicas Ray Serve believes to be alive, shared inside one process.

Ray Serve pickles a custom request router *by value*, so state in `router.ray_router` would exist twice.
This module is imported by reference from both sides: the request router publishes, the sync watches.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable

Watcher = Callable[[frozenset[str]], None]


class Membership:
    """The replica ids of one deployment. Thread-safe: Serve may run its router on a loop of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: frozenset[str] = frozenset()
        self._watchers: list[tuple[asyncio.AbstractEventLoop, contextvars.Context, Watcher]] = []

    @property
    def ids(self) -> frozenset[str]:
        """Replica ids as last published; empty before the first publication."""
        return self._ids

    def publish(self, ids: frozenset[str]) -> None:
        """Replace the set; every watcher hears of it on its own event loop."""
        with self._lock:
            if ids == self._ids:
                return
            self._ids = ids
            watchers = list(self._watchers)
        for loop, context, callback in watchers:
            if not loop.is_closed():
                # In the watcher's own context: what it starts must not become a child of the request that
                # happened to find a replica dead, which Serve would cancel together with that request.
                loop.call_soon_threadsafe(callback, ids, context=context)

    def watch(self, callback: Watcher) -> Callable[[], None]:
        """Call `callback(ids)` on the running loop for the present set and each later one.

        Returns a function that ends the watch.
        """
        entry = (asyncio.get_running_loop(), contextvars.copy_context(), callback)
        with self._lock:
            self._watchers.append(entry)
            ids = self._ids
        entry[0].call_soon(callback, ids)

        def stop() -> None:
            with self._lock:
                if entry in self._watchers:
                    self._watchers.remove(entry)

        return stop


_memberships: dict[str, Membership] = {}
_memberships_lock = threading.Lock()


def membership(deployment: str) -> Membership:
    """The one `Membership` of a deployment (`app/name`) in this process."""
    with _memberships_lock:
        return _memberships.setdefault(deployment, Membership())
