"""Around every HTTP exchange: its id, its outcome in the metrics, the client's presence, the last resort."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.errors import CLIENT_CLOSED, ClientGone, internal
from router.api.metrics import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KEY = "warmroute.exchange"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass
class Exchange:
    """One request and its answer.

    Attributes:
        request_id: the client's `x-request-id` if that is usable, else a new one.
        status: what was or will be counted. A stream that fails after its 200 sets the status it deserves.
        endpoint: the route's path for the metrics; unknown paths share "other".
        started_at: `time.monotonic` at arrival.
    """

    request_id: str
    status: int | None = None
    endpoint: str = "other"
    started_at: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds since arrival."""
        return time.monotonic() - self.started_at


def exchange_of(scope: Scope) -> Exchange:
    """The exchange that `ExchangeMiddleware` keeps in `scope`."""
    found = scope[_KEY]
    assert isinstance(found, Exchange)
    return found


class ExchangeMiddleware:
    """Outermost layer: ids, the count of outcomes, and a clean 500 for what nobody expected."""

    def __init__(self, app: ASGIApp, metrics: Metrics, send_request_id: bool = True) -> None:
        self._app = app
        self._metrics = metrics
        self._send_request_id = send_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(_request_id(Headers(scope=scope).get("x-request-id")))
        scope[_KEY] = exchange
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._send_request_id:
                    MutableHeaders(scope=message)["x-request-id"] = exchange.request_id
                exchange.status = exchange.status or message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server drops requests whose client has gone
            exchange.status = CLIENT_CLOSED
            raise
        except Exception:
            # The last resort: whatever went wrong, the client gets the usual shape, the log the traceback.
            self._metrics.internal_errors.inc()
            logger.exception("request %s failed", exchange.request_id)
            exchange.status = 500
            if not started:
                await _send_internal(send_with_id)
        finally:
            self._metrics.requests.labels(exchange.endpoint, str(exchange.status or CLIENT_CLOSED)).inc()


class ClientWatch:
    """Notices that the client has left, while its request is served. The body must have been read before."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.gone = asyncio.get_running_loop().create_task(self._until_gone())

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """`work`'s result; cancelled when the client leaves.

        Raises:
            ClientGone: it left first.
        """
        task = asyncio.get_running_loop().create_task(work)
        try:
            await asyncio.wait({task, self.gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientGone
        finally:
            abandon(task)
            if not task.done():
                await asyncio.wait({task})

    def stop(self) -> None:
        """Stop watching."""
        self.gone.cancel()

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def abandon(task: asyncio.Task[Any]) -> None:
    """Cancel a task whose result nobody will ask for; a failure of it is not reported as a forgotten one."""
    task.cancel()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


def _request_id(given: str | None) -> str:
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"req-{uuid.uuid4().hex}"


async def _send_internal(send: Send) -> None:
    error = internal()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(error.body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body})
