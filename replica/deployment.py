"""The replica on Ray Serve: one engine in an actor, reached by `generate`, `poll`, `clear_cache`, `explain`.

All speak plain dicts with a version. `generate` streams start, delta, end or error chunks; `poll` is the
long poll by which every router learns what this replica's cache holds and how busy it is; the others are for
administration. The engine steps
in a thread of its own, so health checks, aborts and polls are answered while a prefill runs.
"""

import asyncio
import dataclasses
import logging
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
from ray import serve

from replica.config import EngineConfig
from replica.errors import ConfigError, ReplicaError
from replica.models import load_tokenizer
from replica.request import Request, SamplingParams, error_chunk, tokens_from_wire
from replica.tokenizer import Tokenizer
from replica.worker import EngineWorker, build_worker

logger = logging.getLogger(__name__)

_WARM_UP_PROMPT, _WARM_UP_ANSWER = 128, 4

_SET_HERE = frozenset({"model", "hash_secret", "replica_id"})


def engine_config(model: str, options: dict[str, Any], **more: Any) -> EngineConfig:
    """The engine's configuration from a deployment's `engine` options.

    Raises:
        ConfigError: an unknown option, or a value that cannot work.
    """
    known = {field.name for field in dataclasses.fields(EngineConfig)} - _SET_HERE
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ConfigError(f"unknown engine option {unknown[0]!r}; known: {', '.join(sorted(known))}")
    try:
        return EngineConfig(model=model, **options, **more)
    except TypeError as error:
        raise ConfigError(f"engine options: {error}") from error


def load_codec(model: str) -> Tokenizer:
    """Tokenizer and chat template of a model, for the router's side of a request."""
    return load_tokenizer(model)


def log_to_stderr() -> None:
    """Let this process's warnings reach Ray's log of the worker.

    Serve replaces `sys.stderr` in its actors by a logger of its own, which in throughput mode is silent.
    """
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s -- %(message)s"))
    for name in ("kernels", "kvcore", "replica", "router"):
        package = logging.getLogger(name)
        package.setLevel(logging.INFO)
        package.propagate = False
        package.handlers = [handler]


class Replica:
    """One model replica. Serve constructs it; `engine` are the options of `engine_config`."""

    # Serve awaits it; the type checker knows only plain constructors.
    async def __init__(  # type: ignore[misc]
        self, model: str, engine: dict[str, Any], secret: bytes
    ) -> None:
        log_to_stderr()
        self.id: str = serve.get_replica_context().replica_id.unique_id
        config = engine_config(model, engine, hash_secret=secret, replica_id=self.id)
        self._worker: EngineWorker = await asyncio.to_thread(build_worker, config)
        self._worker.start()
        await self._warm_up()

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Stream the chunks of one request; closing the stream aborts it."""
        try:
            parsed = Request.from_wire(request)
        except ReplicaError as error:
            yield error_chunk("invalid", str(error))
            return
        async for chunk in self._worker.generate(parsed):
            yield chunk

    async def poll(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer with cache changes after (epoch, seq), at once if there are any, else after `timeout_s`."""
        if request.get("target") not in (None, self.id):
            # Serve fell back to us since the target is gone; our state must not be taken for its own.
            return {"v": 1, "replica": self.id}
        return await self._worker.poll(request["epoch"], request["seq"], request["timeout_s"])

    async def clear_cache(self, request: dict[str, Any]) -> dict[str, Any]:
        """Forget what is cached for `namespace` (None: everything); see `EngineWorker.clear_cache`."""
        return await self._administer(request, lambda: self._worker.clear_cache(request["namespace"]))

    async def explain(self, request: dict[str, Any]) -> dict[str, Any]:
        """Why a prompt (`tokens`, little-endian int32 bytes) hits as far as it does in `namespace`."""

        def work() -> dict[str, Any]:
            return self._worker.explain(tokens_from_wire(request["tokens"]), request["namespace"] or {})

        return await self._administer(request, work)

    async def _administer(
        self, request: dict[str, Any], work: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Do it off the event loop, if we are meant; a caller's mistake comes back as an error chunk."""
        if request.get("target") not in (None, self.id):
            return {"v": 1, "replica": self.id}
        try:
            return await asyncio.to_thread(work)
        except ReplicaError as error:
            return {"v": 1, "replica": self.id, "error": error_chunk("invalid", str(error))}

    async def _warm_up(self) -> None:
        """Pay for lazy initialisation before Serve sends requests, and learn how fast this machine is."""
        context = (await self._worker.poll(None, 0, 0.0))["model"]["context_length"]
        sampling = SamplingParams(max_tokens=_WARM_UP_ANSWER, temperature=0.0, ignore_eos=True)
        tokens = np.zeros(max(1, min(_WARM_UP_PROMPT, context - _WARM_UP_ANSWER)), dtype=np.int32)
        for number in range(2):
            request = Request(f"warm-up-{number}", tokens, sampling, read=False, publish=False)
            async for chunk in self._worker.generate(request):
                if chunk["type"] == "error":
                    raise ReplicaError(f"the warm-up failed: {chunk['message']}")

    def check_health(self) -> None:
        """Serve's health check. Raises when the engine thread has died; Serve then replaces the replica."""
        if not self._worker.health():
            raise ReplicaError("the engine has stopped")

    def __del__(self) -> None:
        # Also called after a constructor that failed half-way.
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.stop()
