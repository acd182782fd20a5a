"""The replica on Ray Serve: one engine in an actor, reached by `generate`, `poll`, `clear_cache`, `explain`.

All speak plain dicts with a version. `generate` streams start, delta, end or error chunks; `poll` is the
long poll by which every router learns what this replica's cache holds and how busy it is; the others are for
administration. The engine steps in a thread of its own, so health checks, aborts and polls are answered while
a prefill runs. A tensor-parallel replica has an actor for each further rank, in its own placement group.
"""

import asyncio
import dataclasses
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent import futures
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from replica.config import EngineConfig
from replica.errors import ConfigError, ReplicaError
from replica.models import load_config, load_tokenizer
from replica.parallel.follower import Task, follow
from replica.parallel.shard import check_split
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


def check_ranks(config: EngineConfig) -> None:
    """Raise `ConfigError` for a model that `tensor_parallel` ranks cannot share, or a `ModelError`."""
    if config.tensor_parallel > 1:
        check_split(load_config(config.model), config.tensor_parallel)


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


class Rank:
    """Another rank of a replica's model."""

    def follow(self, task: Task) -> None:
        """Take part until the replica has gone; the actor ends with it."""
        log_to_stderr()
        follow(task)


class RayFollowers:
    """Ranks as actors, in bundles 1 ... of this replica's placement group. Implements `Followers`."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        group = get_current_placement_group()
        if group is None or group.bundle_count <= len(tasks):
            raise ConfigError(f"tensor_parallel {len(tasks) + 1} needs a placement group of as many bundles")
        self._actors, self._runs = [], {}
        for task in tasks:
            bundle = group.bundle_specs[task.rank]
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=task.rank)
            actor: Any = ray.remote(Rank).options(
                num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), scheduling_strategy=strategy
            )
            self._actors.append(actor.remote())
            self._runs[task.rank] = self._actors[-1].follow.remote(task).future()

    def lost(self, wait_s: float = 0.0) -> str | None:
        """See `Followers.lost`."""
        ended = futures.wait(self._runs.values(), wait_s, futures.FIRST_COMPLETED).done
        words = (f"rank {rank} ended: {_first_line(run)}" for rank, run in self._runs.items() if run in ended)
        return "; ".join(words) or None

    def stop(self) -> None:
        """Kill them: they hold nothing that needs saving."""
        if ray.is_initialized():  # with Ray gone so are they, and asking would start another one
            for actor in self._actors:
                ray.kill(actor)


def _first_line(run: futures.Future[None]) -> str:
    return str(run.exception()).partition("\n")[0]


class Replica:
    """One model replica. Serve constructs it; `engine` are the options of `engine_config`."""

    # Serve awaits it; the type checker knows only plain constructors.
    async def __init__(  # type: ignore[misc]
        self, model: str, engine: dict[str, Any], secret: bytes
    ) -> None:
        log_to_stderr()
        self.id: str = serve.get_replica_context().replica_id.unique_id
        config = engine_config(model, engine, hash_secret=secret, replica_id=self.id)
        self._followers: RayFollowers | None = None
        self._worker: EngineWorker = await asyncio.to_thread(build_worker, config, self._launch)
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

    def _launch(self, tasks: Sequence[Task]) -> RayFollowers:
        self._followers = RayFollowers(tasks)
        return self._followers

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
        """Serve's health check. Raises when the engine or a rank has died; Serve replaces the replica."""
        if not self._worker.health():
            raise ReplicaError("the engine has stopped")
        if self._followers is not None and (lost := self._followers.lost()):
            raise ReplicaError(f"tensor parallelism broke down: {lost}")

    def __del__(self) -> None:
        # Also called after a constructor that failed half-way.
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.stop()
