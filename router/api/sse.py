"""Server-sent events: frames as bytes, and a response that ends with its client."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from json.encoder import encode_basestring_ascii
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.errors import CLIENT_CLOSED, ApiError
from router.api.exchange import ClientWatch, abandon, exchange_of

logger = logging.getLogger(__name__)

_LAST_BYTE_S = 1.0

DONE = b"data: [DONE]\n\n"


def quote(text: str | None) -> str:
    """A JSON string, or null. A fifth of the time of `json.dumps`, which matters once per token."""
    return "null" if text is None else encode_basestring_ascii(text)


def event(payload: Mapping[str, Any]) -> bytes:
    """One event with a JSON object as its data."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The event that ends a stream early; no [DONE] follows, so that nobody takes the answer for complete."""
    return event(error.payload)


class EventStream(Response):
    """Sends frames until they end, the client leaves, or it has read nothing for too long.

    `close` is called exactly once, whatever happens, and must not wait.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        watch: ClientWatch,
        close: Callable[[], None],
        limit_s: float,
        headers: Mapping[str, str],
    ) -> None:
        """`limit_s`: seconds for the whole stream, after which even a blocked `send` is given up."""
        self.status_code = 200
        self.background = None
        # Proxies that buffer would hold tokens back (x-accel-buffering is nginx's switch).
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self._frames = frames
        self._watch = watch
        self._close = close
        self._limit_s = limit_s
        self._complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        pump = asyncio.get_running_loop().create_task(self._pump(send))
        try:
            await asyncio.wait(
                {pump, self._watch.gone}, timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            if self._complete and not pump.done():
                # The last byte is on its way: servers report a disconnect after a complete answer, too.
                await asyncio.wait({pump}, timeout=_LAST_BYTE_S)
            if pump.done():
                pump.result()
            else:
                exchange_of(scope).status = CLIENT_CLOSED
        except OSError:  # what some servers raise from `send` when the client has left
            exchange_of(scope).status = CLIENT_CLOSED
        finally:
            abandon(pump)
            self._close()
            self._watch.stop()

    async def _pump(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for frame in self._frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            self._complete = True
            await send({"type": "http.response.body", "body": b""})
        finally:
            await self._frames.aclose()
