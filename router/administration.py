"""Orders and questions to replicas beside the requests: clear a cache, explain a hit.

Each replica answers for itself, within a time limit; what one fails at is told beside what the others say.
What clearing changes reaches every router as any other change of a cache: with the replicas' events.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from router.errors import ReplicaLost, UpstreamError
from router.stream import Chunk, protocol_error

logger = logging.getLogger(__name__)

_Check = Callable[[Any], bool]


class AdminTransport(Protocol):
    """Carries orders to replicas. Each call takes at most `timeout_s` seconds.

    Raises:
        ReplicaLost: the replica died, or did not answer in time.
        UpstreamError: it failed.
    """

    def clear_cache(self, replica_id: str, request: Chunk, timeout_s: float) -> Awaitable[Any]:
        """Forget what is cached for `namespace`, or everything where that is None."""
        ...

    def explain(self, replica_id: str, request: Chunk, timeout_s: float) -> Awaitable[Any]:
        """Why a prompt (`tokens`, int32 as little-endian bytes) hits as far as it does in `namespace`."""
        ...


@dataclass(frozen=True)
class Report:
    """What one replica answered: its figures, or the code and message of its failure."""

    replica_id: str
    figures: Mapping[str, Any] | None = None
    error: tuple[str, str] | None = None


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


# Figures of an answer, and how each is recognised. Those in _OPTIONAL may be missing.
_CLEARED: dict[str, _Check] = {"cleared": _count, "held": _count}
_EXPLAINED: dict[str, _Check] = {
    "num_tokens": _count,
    "hit_tokens": _count,
    "reason": lambda value: type(value) is str,
    "evicted_s_ago": lambda value: value is None or type(value) in (int, float),
}
_OPTIONAL = frozenset({"cleared", "evicted_s_ago"})


class Administration:
    """Asks replicas, all at once. Runs on the router's event loop."""

    def __init__(
        self, transport: AdminTransport, replicas: Callable[[], Iterable[str]], timeout_s: float = 10.0
    ) -> None:
        """`replicas` tells which there are, silent ones included; `timeout_s` is what each has to answer."""
        self._transport = transport
        self._replicas = replicas
        self._timeout_s = timeout_s

    @property
    def replica_ids(self) -> list[str]:
        """The replicas there are, sorted."""
        return sorted(self._replicas())

    async def clear(self, namespace: Mapping[str, Any] | None, replica_ids: Iterable[str]) -> list[Report]:
        """Forget what is cached for a namespace (`tenant`, `salt`, `adapter`), or everything for None.

        Figures: `cleared` (blocks that nobody can hit any more; not every version tells), `held` (blocks that
        running requests still use and that die with them).
        """
        request = {"v": 1, "namespace": namespace}
        return await self._ask_all(self._transport.clear_cache, replica_ids, request, _CLEARED)

    async def explain(
        self, tokens: npt.NDArray[np.int32], namespace: Mapping[str, Any], replica_ids: Iterable[str]
    ) -> list[Report]:
        """Why a prompt, int32[n], would hit as far as it does now.

        Figures: `num_tokens`, `hit_tokens`, `reason`, `evicted_s_ago` (seconds, or None).
        """
        data = tokens.astype("<i4", copy=False).tobytes()
        request = {"v": 1, "tokens": data, "namespace": namespace}
        return await self._ask_all(self._transport.explain, replica_ids, request, _EXPLAINED)

    async def _ask_all(
        self,
        call: Callable[[str, Chunk, float], Awaitable[Any]],
        replica_ids: Iterable[str],
        request: Chunk,
        known: Mapping[str, _Check],
    ) -> list[Report]:
        names = list(replica_ids)
        calls = (call(name, request, self._timeout_s) for name in names)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [_report(name, answer, known) for name, answer in zip(names, answers, strict=True)]


def _report(replica_id: str, answer: Any, known: Mapping[str, _Check]) -> Report:
    try:
        if isinstance(answer, asyncio.CancelledError):  # from below: ours would have ended the waiting, too
            raise ReplicaLost(replica_id, "the call was cancelled")
        if isinstance(answer, BaseException):
            raise answer
        return Report(replica_id, figures=_figures(replica_id, answer, known))
    except UpstreamError as error:
        logger.warning("replica %s did not do as the administrator wished: %s", replica_id, error)
        return Report(replica_id, error=(error.code, error.message))


def _figures(replica_id: str, answer: Any, known: Mapping[str, _Check]) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise protocol_error(replica_id, "something that is no answer")
    if isinstance(error := answer.get("error"), dict):
        raise UpstreamError(str(error.get("message", "")), str(error.get("code", "internal")), replica_id)
    found = {name: answer[name] for name in known if name in answer}
    if known.keys() - found.keys() - _OPTIONAL or not all(known[name](found[name]) for name in found):
        raise protocol_error(replica_id, "a malformed answer")
    return found
