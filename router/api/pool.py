"""A few threads that keep long bodies off the event loop: parsing, checking, rendering, tokenizing."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from router.api.errors import overloaded

T = TypeVar("T")


class BodyPool:
    """Runs what must be computed for a body: at once for short ones, in a thread for the others.

    A thread hop costs about 100 us, as much as checking and tokenizing a few hundred characters. At most
    `max_pending` bodies wait or run; more are refused, so that memory stays bounded.
    """

    def __init__(self, threads: int, inline_bytes: int, max_pending: int) -> None:
        self._inline_bytes = inline_bytes
        self._max_pending = max_pending
        self._pending = 0
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="body")

    async def run(self, call: Callable[[bytes], T], body: bytes) -> T:
        """`call(body)`, and what it raises.

        Raises:
            ApiError: 429 when too many long bodies are waiting.
        """
        if len(body) <= self._inline_bytes:
            return call(body)
        if self._pending >= self._max_pending:
            raise overloaded()
        future = self._threads.submit(call, body)
        self._pending += 1
        # Counted until the thread is done, even when the request that waits for it has been cancelled.
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _call_in(loop, self._done))
        return await asyncio.wrap_future(future)

    def _done(self) -> None:
        self._pending -= 1


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
