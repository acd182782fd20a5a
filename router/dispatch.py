"""One request's way to a replica: place, send, retry elsewhere.

`Dispatcher.open` returns once the replica's first token is there. A replica that dies or is full before that
is left out and the request goes to another, unseen by the client; afterwards its death ends the stream with
`ReplicaLost`. `Dispatcher.run` collects a whole answer, so it can start over even then.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace
from router.errors import BadRequest, NoReplica, QueueFull, ReplicaLost, RouterError, UpstreamError
from router.placement import Decision, Placement
from router.stream import Channel, Chunk, DispatchLimits, DispatchObserver, Stream, Transport

__all__ = [
    "DispatchLimits",
    "DispatchObserver",
    "Dispatcher",
    "ModelInfo",
    "PreparedRequest",
    "Result",
    "Stream",
    "Transport",
]

logger = logging.getLogger(__name__)

_NO_HASHES: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True)
class ModelInfo:
    """What the replicas say about the model they run: the parts of the cache's namespace, and its limits."""

    digest: str
    layout: str
    block_size: int
    context_length: int


@dataclass(frozen=True, eq=False)
class PreparedRequest:
    """A checked, tokenized request.

    Attributes:
        id: unique; attempts add a suffix.
        tokens: int32[n], n >= 1.
        sampling: the wire's "sampling" dict.
        tenant, salt: who shares cached prefixes with whom.
        use_cache: False neither reads nor fills the cache.
        keep: how long the cache keeps it: the wire's "priority" or "retention", or nothing.
    """

    id: str
    tokens: npt.NDArray[np.int32] = field(repr=False)
    sampling: dict[str, Any] = field(repr=False)
    tenant: str | None = None
    salt: str | None = field(default=None, repr=False)
    use_cache: bool = True
    keep: Mapping[str, Any] = field(default_factory=dict)

    @property
    def choices(self) -> int:
        """Answers that a replica draws at the same time, of which the best "n" are sent."""
        return int(self.sampling.get("best_of") or self.sampling["n"])

    def wire(self, attempt: int, hashes: npt.NDArray[np.uint64]) -> Chunk:
        """The request as a replica reads it; the transport fills in the target."""
        return {
            "v": 1,
            "id": f"{self.id}-{attempt}",
            "target": None,
            "tokens": self.tokens.astype("<i4", copy=False).tobytes(),
            "hashes": hashes.astype("<u8", copy=False).tobytes(),
            "namespace": {"tenant": self.tenant, "salt": self.salt, "adapter": None},
            "sampling": self.sampling,
            "cache": {"read": self.use_cache, "publish": self.use_cache, **self.keep},
        }


@dataclass
class _Trail:
    """What happened to one request so far."""

    deadline: float
    attempts: int = 0
    losses: int = 0
    lost: set[str] = field(default_factory=set)
    full: set[str] = field(default_factory=set)

    @property
    def exclude(self) -> frozenset[str]:
        return frozenset(self.lost | self.full)


@dataclass(frozen=True)
class Result:
    """A whole answer: its deltas in order of arrival, and the stream's facts."""

    deltas: list[Chunk]
    stream: Stream


class Dispatcher:
    """Sends prepared requests to the replicas that `placement` chooses."""

    def __init__(
        self,
        placement: Placement,
        hasher: PrefixHasher,
        transport: Transport,
        model_info: Callable[[], ModelInfo | None],
        limits: DispatchLimits | None = None,
        observer: DispatchObserver | None = None,
    ) -> None:
        """`model_info` returns None until a replica has answered; until then requests meet `NoReplica`."""
        self.placement = placement
        self.model_info = model_info
        self.limits = limits or DispatchLimits()
        self._hasher = hasher
        self._channel = Channel(placement, transport, self.limits, observer or DispatchObserver())

    def observe(self, observer: DispatchObserver) -> None:
        """Tell `observer`, instead of the one given at construction, from now on."""
        self._channel.observer = observer

    def lose(self, replica_id: str) -> None:
        """A replica no longer answers: no request goes there, and those that are there meet `ReplicaLost`.

        Unlike a replica that leaves in good order (`Placement.leave`), whose streams go on to their end.
        """
        self.placement.leave(replica_id)
        self._channel.lose(replica_id)

    async def open(self, prepared: PreparedRequest) -> Stream:
        """Place and send; returns with the first token. The caller must exhaust or close the stream.

        Raises:
            NoReplica, QueueFull: nobody may take it now.
            ReplicaLost: as many replicas as `max_attempts` were lost, or all there are.
            BadRequest: the replica found the request invalid.
            UpstreamError: the replica failed on it.
            RequestTimeout: no first token in time.
        """
        return await self._open(prepared, self._trail())

    async def run(self, prepared: PreparedRequest) -> Result:
        """The whole answer; starts over on another replica when one dies, since nobody has seen anything yet.

        Raises as `open`.
        """
        trail = self._trail()
        while True:
            stream = await self._open(prepared, trail)
            try:
                deltas = [delta async for delta in stream]
                return Result(deltas, stream)
            except ReplicaLost as error:
                self._note_loss(error, trail, stream)
            finally:
                stream.close()

    def _trail(self) -> _Trail:
        return _Trail(deadline=time.monotonic() + self.limits.request_timeout_s)

    async def _open(self, prepared: PreparedRequest, trail: _Trail) -> Stream:
        began = time.perf_counter()
        hashes = self._hashes(prepared)
        while True:
            trail.attempts += 1
            request = prepared.wire(trail.attempts, hashes)
            decision = self._place(prepared, hashes, trail)
            stream = Stream(self._channel, decision, trail.deadline, trail.attempts)
            if trail.attempts == 1:
                self._channel.observer.routed(time.perf_counter() - began)
            try:
                await stream.begin(request)
                return stream
            except UpstreamError as error:
                self._note_failure(error, trail, stream)

    def _hashes(self, prepared: PreparedRequest) -> npt.NDArray[np.uint64]:
        info = self.model_info()
        if info is None:
            raise NoReplica("no replica has told yet which model it runs")
        namespace = Namespace(info.digest, info.layout, tenant=prepared.tenant, salt=prepared.salt)
        return self._hasher.block_hashes(prepared.tokens, info.block_size, self._hasher.root(namespace))

    def _place(self, prepared: PreparedRequest, hashes: npt.NDArray[np.uint64], trail: _Trail) -> Decision:
        # A request that may not read the cache has no affinity.
        known = hashes if prepared.use_cache else _NO_HASHES
        try:
            return self.placement.place(
                known,
                len(prepared.tokens),
                exclude=trail.exclude,
                publish=prepared.use_cache,
                choices=prepared.choices,
            )
        except NoReplica:
            if trail.full:
                raise QueueFull(self.limits.retry_after_s) from None
            if trail.lost:
                raise ReplicaLost(None, f"no replica is left after {trail.losses} lost") from None
            raise

    def _note_failure(self, error: UpstreamError, trail: _Trail, stream: Stream) -> None:
        """Return if the request may go elsewhere; raise otherwise."""
        if error.code == "unavailable":  # ReplicaLost, too
            self._note_loss(error, trail, stream)
        elif error.code == "queue_full":
            trail.full.add(stream.replica_id)
            if len(trail.full) >= self.limits.max_full:
                raise QueueFull(self.limits.retry_after_s) from error
            self._channel.observer.retried("full")
        elif error.code == "invalid":
            raise BadRequest(error.message) from error
        else:
            raise error

    def _note_loss(self, error: RouterError, trail: _Trail, stream: Stream) -> None:
        trail.losses += 1
        trail.lost.add(stream.replica_id)
        self._channel.observer.lost(stream.replica_id)
        logger.warning("replica %s lost (attempt %d): %s", stream.replica_id, trail.attempts, error)
        if trail.losses >= self.limits.max_attempts:
            raise ReplicaLost(stream.replica_id, f"{trail.losses} replicas were lost") from error
        self._channel.observer.retried("lost")
