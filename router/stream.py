"""The answer to one request, as it comes from one replica.

A `Stream` owns a reservation in the ledger and a transport's iterator, and gives both back exactly once, at
whichever comes first: the end, an error, a timeout, `close`, `fail`. Giving the reservation back is
synchronous, so that no cancellation can come between; the iterator is closed in a task that no cancelled
request takes along.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio

from router.errors import ReplicaLost, RequestTimeout, UpstreamError
from router.placement import Decision, Placement

logger = logging.getLogger(__name__)

Chunk = dict[str, Any]


class Transport(Protocol):
    """Carries requests to replicas."""

    def generate(self, replica_id: str, request: Chunk) -> AsyncIterator[Chunk]:
        """The replica's chunks: start, deltas, end, or an error. `aclose` or cancelling aborts the request.

        Raises:
            ReplicaLost: the replica died or cannot be reached.
            UpstreamError: it failed on this request.
        """
        ...


@dataclass(frozen=True)
class DispatchLimits:
    """How long and how often.

    Attributes:
        request_timeout_s: seconds for a whole request, retries included.
        start_timeout_s: seconds until a replica's first token; not retried, since slow is mostly overload.
        max_attempts: replicas that may be lost or tried for one request.
        max_full: replicas that may answer "queue full" before the client hears 429.
        retry_after_s: what a client is told to wait when placement has no estimate.
        close_timeout_s: seconds to wait for a transport to close its iterator.
    """

    request_timeout_s: float = 600.0
    start_timeout_s: float = 120.0
    max_attempts: int = 3
    max_full: int = 32
    retry_after_s: float = 1.0
    close_timeout_s: float = 1.0


class DispatchObserver:
    """Hears what happens to requests; does nothing by default. Called on the event loop: keep it short."""

    def routed(self, seconds: float) -> None:
        """Hashing, choosing and reserving took so long."""

    def started(self, predicted_tokens: int, cached_tokens: int) -> None:
        """A replica started a request: the hit that was predicted, and the real one."""

    def retried(self, reason: str) -> None:
        """An attempt failed and another one follows: "lost" or "full"."""

    def aborted(self) -> None:
        """A request was given up before its end: the client left, or its time was over."""

    def lost(self, replica_id: str) -> None:
        """A replica turned out to be gone."""

    def close_failed(self) -> None:
        """A transport's iterator could not be closed, or not in time: its request may still be computed."""


@dataclass
class Channel:
    """What every stream of a dispatcher shares.

    `open` are the streams that hold a reservation; `closing` keeps the tasks that close iterators alive.
    """

    placement: Placement
    transport: Transport
    limits: DispatchLimits
    observer: DispatchObserver
    open: "set[Stream]" = field(default_factory=set)
    closing: set[asyncio.Task[None]] = field(default_factory=set)

    def lose(self, replica_id: str) -> None:
        """A replica no longer answers: end every stream from it, as waiting for it is in vain."""
        for stream in [s for s in self.open if s.replica_id == replica_id]:
            stream.fail(ReplicaLost(replica_id, "the replica no longer answers"))

    def close_later(self, chunks: AsyncIterator[Chunk]) -> asyncio.Task[None] | None:
        """Close a transport's iterator in the background."""
        aclose = getattr(chunks, "aclose", None)
        if aclose is None:
            return None
        task = asyncio.get_running_loop().create_task(self._close(aclose))
        self.closing.add(task)
        task.add_done_callback(self.closing.discard)
        return task

    async def _close(self, aclose: Callable[[], Any]) -> None:
        timeout_s = self.limits.close_timeout_s
        try:
            with anyio.move_on_after(timeout_s) as scope:
                await aclose()
        except Exception:
            # The request is over and its reservation given back; a failing close must reach nobody's request.
            logger.warning("closing a transport failed", exc_info=True)
            self.observer.close_failed()
            return
        if scope.cancelled_caught:
            logger.warning("a transport did not close within %g s", timeout_s)
            self.observer.close_failed()


class Stream:
    """The answer to one request, from its first token on. Iterate for delta chunks; iterate once.

    Attributes:
        replica_id: who answers (Serve may have chosen another one than placement did).
        predicted_tokens, reason: placement's.
        prompt_tokens, cached_tokens: the replica's.
        completion_tokens: the replica's, after the end.
        attempts: how many replicas were tried, this one included.
        started_at: `time.monotonic` at the first token.
    """

    def __init__(self, channel: Channel, decision: Decision, deadline: float, attempts: int) -> None:
        """Owns `decision.reservation` from here on; `deadline` is on `time.monotonic`'s clock."""
        self.replica_id = decision.replica_id
        self.predicted_tokens = decision.predicted_tokens
        self.reason = decision.reason
        self.attempts = attempts
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.started_at = 0.0
        self._channel = channel
        self._decision = decision
        self._deadline = deadline
        self._chunks: AsyncIterator[Chunk] | None = None
        self._reading: anyio.CancelScope | None = None
        self._closing: asyncio.Task[None] | None = None
        self._open = True
        self._failure: UpstreamError | None = None
        channel.open.add(self)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Chunk:
        """The next delta.

        Raises:
            ReplicaLost, UpstreamError, RequestTimeout: the stream is over, unfinished.
        """
        if self._failure is not None:
            raise self._failure
        if not self._open:
            raise StopAsyncIteration
        try:
            chunk = await self._read(self._deadline)
            if chunk["type"] == "delta":
                return chunk
            if chunk["type"] != "end":
                raise protocol_error(self.replica_id, f"a second {chunk['type']} chunk")
            self.completion_tokens = _count(self.replica_id, chunk, "completion_tokens")
        except BaseException as error:
            self._settle(aborted=not isinstance(error, UpstreamError))
            raise
        self._settle(aborted=False)
        raise StopAsyncIteration

    def close(self) -> None:
        """Give everything back; before the end this aborts the request. Idempotent, never waits."""
        self._settle(aborted=True)

    def fail(self, error: UpstreamError) -> None:
        """End an open stream with `error`, which whoever reads it gets, now or at the next read."""
        if self._open:
            self._failure = error
            self._settle(aborted=False)

    async def aclose(self) -> None:
        """`close`, and wait (bounded) until the transport has let go."""
        self.close()
        if self._closing is not None:
            await asyncio.wait({self._closing}, timeout=self._channel.limits.close_timeout_s)

    async def begin(self, request: Chunk) -> None:
        """Send, and wait for the start chunk. Raises as `Dispatcher.open`, for this one replica."""
        limits = self._channel.limits
        patience = time.monotonic() + limits.start_timeout_s
        try:
            self._chunks = self._channel.transport.generate(self._decision.replica_id, request)
            chunk = await self._read(min(patience, self._deadline), started=False)
            if chunk["type"] != "start":
                raise protocol_error(self.replica_id, f"a {chunk['type']} chunk before the start")
            self._started(chunk)
        except BaseException as error:
            self._settle(aborted=not isinstance(error, UpstreamError))
            raise

    def _started(self, chunk: Chunk) -> None:
        if not isinstance(chunk.get("replica"), str):
            raise protocol_error(self.replica_id, "a start chunk without its name")
        self.replica_id = chunk["replica"]
        self.prompt_tokens = _count(self.replica_id, chunk, "prompt_tokens")
        self.cached_tokens = _count(self.replica_id, chunk, "cached_tokens")
        self.started_at = time.monotonic()
        self._channel.placement.on_start(self._decision, chunk)
        self._channel.observer.started(self.predicted_tokens, self.cached_tokens)

    async def _read(self, until: float, started: bool = True) -> Chunk:
        """The next chunk; an error chunk, a silent end and the time's end raise."""
        assert self._chunks is not None
        chunk: Any = None
        try:
            with anyio.move_on_after(max(0.0, until - time.monotonic())) as self._reading:
                chunk = await self._chunks.__anext__()
        except StopAsyncIteration:
            raise ReplicaLost(self.replica_id, "the replica's answer ended early") from None
        finally:
            scope, self._reading = self._reading, None
            if not self._open:  # closed by another task meanwhile, which left the iterator to this one
                self._let_go()
        if self._failure is not None:  # also when a last chunk came at that very moment
            raise self._failure
        if scope is not None and scope.cancelled_caught:
            if not self._open:
                raise asyncio.CancelledError("the stream was closed")
            raise self._timeout(started)
        if not isinstance(chunk, dict) or not isinstance(chunk.get("type"), str):
            raise protocol_error(self.replica_id, "something that is no chunk")
        if chunk["type"] == "error":
            raise _chunk_error(self.replica_id, chunk)
        return chunk

    def _timeout(self, started: bool) -> RequestTimeout:
        limits = self._channel.limits
        if started or time.monotonic() >= self._deadline:
            return RequestTimeout("the request", limits.request_timeout_s)
        return RequestTimeout("the first token", limits.start_timeout_s)

    def _settle(self, aborted: bool) -> None:
        if not self._open:
            return
        self._open = False
        self._channel.open.discard(self)
        self._channel.placement.finish(self._decision.reservation)
        if aborted:
            self._channel.observer.aborted()
        if self._reading is None:
            self._let_go()
        else:  # an iterator cannot be closed while somebody waits in it
            self._reading.cancel()

    def _let_go(self) -> None:
        if self._chunks is not None:
            self._closing = self._channel.close_later(self._chunks)


def protocol_error(replica_id: str, what: str) -> UpstreamError:
    """A replica that does not keep to the protocol."""
    return UpstreamError(f"replica {replica_id} sent {what}", "internal", replica_id)


def _count(replica_id: str, chunk: Chunk, name: str) -> int:
    value = chunk.get(name)
    if not isinstance(value, int) or value < 0:
        raise protocol_error(replica_id, f"a malformed {chunk['type']} chunk")
    return value


def _chunk_error(replica_id: str, chunk: Chunk) -> UpstreamError:
    code, message = str(chunk.get("code", "internal")), str(chunk.get("message", ""))
    if code == "unavailable":
        return ReplicaLost(replica_id, message)
    return UpstreamError(message, code, replica_id)
