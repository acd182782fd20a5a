"""The engine in a thread of its own, seen from asyncio.

The thread takes commands (add, abort) between steps and hands each step's output to the event loop with one
wake-up. What a slow consumer has not fetched yet is merged, so a stream never holds more than one delta per
choice. An error in one step fails that step's requests; when the engine cannot go on, every caller is told.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcore.namespace import Namespace
from replica.assemble import use_device
from replica.build import build_engine
from replica.config import EngineConfig
from replica.engine import Engine
from replica.errors import EngineDead, InvalidRequest, QueueFull, ReplicaError
from replica.parallel.launch import ChildProcesses, Launch
from replica.request import WIRE_VERSION, Output, Request, error_chunk

logger = logging.getLogger(__name__)


class _Stream:
    """Chunks on their way from the engine to one consumer. Lives in the consumer's event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._chunks: list[dict[str, Any]] = []
        self._open: dict[int, dict[str, Any]] = {}

    def push(self, chunks: list[dict[str, Any]]) -> None:
        """Append chunks; a delta joins an unfetched one of the same choice."""
        for chunk in chunks:
            before = self._open.get(chunk["index"]) if chunk["type"] == "delta" else None
            if before is not None:
                _merge(before, chunk)
                continue
            if chunk["type"] == "delta":
                self._open[chunk["index"]] = chunk
            self._chunks.append(chunk)
        self._ready.set()

    async def fetch(self) -> list[dict[str, Any]]:
        """Everything there is; waits for at least one chunk."""
        await self._ready.wait()
        self._ready.clear()
        chunks, self._chunks, self._open = self._chunks, [], {}
        return chunks


def _merge(into: dict[str, Any], delta: dict[str, Any]) -> None:
    into["text"] += delta["text"]
    into["tokens"] += delta["tokens"]
    if delta["logprobs"] is not None:
        into["logprobs"] += delta["logprobs"]
    into["finish_reason"] = delta["finish_reason"]


class EngineWorker:
    """One engine, its thread, and the callers in one or more event loops.

    Args:
        engine: owned by the worker's thread from `start` on; that thread uses `config.threads` torch threads.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._config = engine.config
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._failure: str | None = None
        self._streams: dict[str, _Stream] = {}
        self._adding = 0
        self._numbers = itertools.count()
        self._watchers: set[_Watcher] = set()
        self._seen_seq, self._seen_busy = engine.cache.seq, False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step it is in, and every stream with an error. Safe to call twice."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is None:
            self._engine.close()  # never started, so nobody else does it
        elif self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def health(self) -> bool:
        """Whether the engine's thread is alive and able to serve."""
        return self._thread.is_alive() and self._failure is None and not self._stopping

    async def generate(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """Stream a request's chunks: start, deltas, end; or one error, after which nothing follows.

        Closing or cancelling the iterator aborts the request: its blocks are free after the running step.
        """
        stream = _Stream()
        request = replace(request, id=f"{request.id}#{next(self._numbers)}")
        refused = self._submit(request, stream)
        if refused is not None:
            yield refused
            return
        try:
            while True:
                for chunk in await stream.fetch():
                    yield chunk
                    if chunk["type"] in ("end", "error"):
                        return
        finally:
            self._drop(request.id)

    async def poll(self, epoch: int | None, seq: int, timeout_s: float) -> dict[str, Any]:
        """Cache changes after (epoch, seq) and the present load.

        Answers at once when there are changes, else with the next ones (a burst of them gathered for
        `config.poll_interval_s`), or without any after `timeout_s` seconds.

        Raises:
            EngineDead: the engine has stopped.
        """
        watcher = _Watcher()
        with self._wake:
            self._watchers.add(watcher)
        try:
            # Watching begins before the look, so no change can fall between the two.
            update = self._updates(epoch, seq)
            if update is None and await watcher.changed(timeout_s):
                await asyncio.sleep(self._config.poll_interval_s)
                update = self._updates(epoch, seq)
        finally:
            with self._wake:
                self._watchers.discard(watcher)
        return {
            "v": WIRE_VERSION,
            "replica": self._config.replica_id,
            "update": update,
            "load": self._engine.load(),
            "model": vars(self._engine.facts),
        }

    def clear_cache(self, namespace: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Forget what is cached for one namespace (of the parts tenant, salt, adapter), or everything.

        A namespace is exactly its parts: a tenant's blocks under a salt are not those without one. Answers
        with the blocks that were `cleared`, and those `held`, as `Engine.clear_cache`. For any thread.

        Raises `InvalidRequest` for a part that is unknown or of a wrong type.
        """
        counts = self._engine.clear_cache(None if namespace is None else self._namespace(namespace))
        self._wake_watchers()
        return {"v": WIRE_VERSION, "replica": self._config.replica_id, **counts}

    def explain(self, tokens: npt.NDArray[np.int32], namespace: Mapping[str, Any]) -> dict[str, Any]:
        """How long a hit of int32[n] would be now, and why it ends there: the fields of `Explanation`.

        For any thread. Raises `InvalidRequest` as `clear_cache`, and for no tokens.
        """
        if len(tokens) == 0:
            raise InvalidRequest("the prompt is empty")
        explanation = self._engine.cache.explain(tokens, self._namespace(namespace))
        return {"v": WIRE_VERSION, "replica": self._config.replica_id, **vars(explanation)}

    def _namespace(self, parts: Mapping[str, Any]) -> Namespace:
        if unknown := sorted(set(parts) - {"tenant", "salt", "adapter"}):
            raise InvalidRequest(f"unknown namespace part {unknown[0]!r}")
        return self._engine.namespace(**parts)

    def _updates(self, epoch: int | None, seq: int) -> bytes | None:
        self._require_life()
        update = self._engine.updates(epoch, seq)
        return None if update is None else update.encode()

    def _require_life(self) -> None:
        if not self.health():
            raise EngineDead(self._failure or "the engine is not running")

    def _submit(self, request: Request, stream: _Stream) -> dict[str, Any] | None:
        """Hand a request to the thread; an error chunk when it is refused here and now."""
        try:
            self._require_life()
            self._engine.check(request, self._adding)
        except EngineDead as error:
            return error_chunk("unavailable", str(error))
        except ReplicaError as error:
            return _refusal(error)
        with self._wake:
            self._streams[request.id] = stream
            self._adding += request.sampling.width
            self._commands.append(lambda: self._add(request))
            self._wake.notify()
            stopped = self._stopping or self._failure is not None
        if stopped:
            self._drop(request.id)
            return error_chunk("unavailable", self._failure or "the engine is stopping")
        return None

    def _drop(self, request_id: str) -> None:
        """Abort unless the engine has already said its last word."""
        with self._wake:
            if self._streams.pop(request_id, None) is not None:
                self._commands.append(lambda: self._abort(request_id))
                self._wake.notify()

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        reason = "the engine was stopped"
        try:
            use_device(torch.device(self._config.device))
            while self._take_commands():
                if self._engine.has_work():
                    self._deliver(self._engine.step())
        except EngineDead as error:
            reason = str(error)
            logger.critical("the engine gives up: %s", error)
        except Exception as error:  # whatever it is, callers must hear of it instead of waiting for ever
            reason = f"the engine died: {type(error).__name__}: {error}"
            logger.critical("the engine died", exc_info=error)
        finally:
            self._end(reason)
            self._engine.close()

    def _take_commands(self) -> bool:
        """Carry out what was asked for; waits while there is nothing to do. False when told to stop."""
        with self._wake:
            while not (self._commands or self._stopping or self._engine.has_work()):
                self._wake.wait()
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        return not self._stopping

    def _add(self, request: Request) -> None:
        with self._wake:
            self._adding -= request.sampling.width
            if request.id not in self._streams:
                return  # dropped before it came this far
        try:
            self._engine.add(request)
            self._seen_busy = True
        except (InvalidRequest, QueueFull) as error:
            self._send([(request.id, [_refusal(error)], True)])

    def _abort(self, request_id: str) -> None:
        if self._engine.abort(request_id):
            self._notify()

    def _deliver(self, outputs: list[Output]) -> None:
        self._send([(o.request_id, o.chunks(self._config.replica_id), o.last) for o in outputs])
        self._notify()

    def _send(self, parts: list[tuple[str, list[dict[str, Any]], bool]]) -> None:
        """Push to the streams, with one wake-up per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, list[dict[str, Any]]]]] = {}
        with self._wake:
            for request_id, chunks, last in parts:
                stream = self._streams.get(request_id)
                if stream is None:
                    continue
                if last:
                    del self._streams[request_id]
                by_loop.setdefault(stream.loop, []).append((stream, chunks))
        for loop, pushes in by_loop.items():
            _call(loop, partial(_push_all, pushes))

    def _notify(self) -> None:
        """Wake the long polls if the cache has changed, or the load of an engine that has come to rest."""
        seq, busy = self._engine.cache.seq, self._engine.has_work()
        if seq != self._seen_seq or (self._seen_busy and not busy):
            self._wake_watchers()
        self._seen_seq, self._seen_busy = seq, busy

    def _wake_watchers(self) -> None:
        with self._wake:
            watchers = tuple(self._watchers)
        for watcher in watchers:
            _call(watcher.loop, watcher.event.set)

    def _end(self, reason: str) -> None:
        """Nobody may be left waiting for an engine that is gone."""
        with self._wake:
            self._failure = reason
            waiting = list(self._streams)
        self._send([(request_id, [error_chunk("unavailable", reason)], True) for request_id in waiting])
        self._wake_watchers()


class _Watcher:
    """One long poll, waiting in its event loop for the cache to change."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.event = asyncio.Event()

    async def changed(self, timeout_s: float) -> bool:
        """True once woken, False after `timeout_s` seconds."""
        try:
            await asyncio.wait_for(self.event.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True


def _push_all(pushes: list[tuple[_Stream, list[dict[str, Any]]]]) -> None:
    for stream, chunks in pushes:
        stream.push(chunks)


def _refusal(error: ReplicaError) -> dict[str, Any]:
    return error_chunk("queue_full" if isinstance(error, QueueFull) else "invalid", str(error))


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        # The consumer's loop was closed without closing its streams; there is nobody left to tell.
        logger.debug("an event loop is gone")


def build_worker(config: EngineConfig, launch: Launch = ChildProcesses) -> EngineWorker:
    """A worker, not yet started, for a freshly loaded engine. Raises like `build_engine`."""
    return EngineWorker(build_engine(config, launch))
