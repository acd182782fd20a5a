"""One simulated engine: the real prefix cache, chunked prefill and continuous batching, timed by a model.

A step takes decodes first, goes on with started prefills, then admits waiting requests, oldest first, under a
token budget. Steps of pure decoding are taken many at once, until a request ends or a new one comes, so the
cost of a simulation grows with requests and prefill chunks, not with answer tokens. Answers take blocks but
are never published: a trace does not say what was answered.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcore.cache import PrefixCache
from kvcore.errors import OutOfBlocks
from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace
from router.lab.sim.request import SimRequest
from router.lab.sim.timing import Timing

SPACE = Namespace("simulated")


@dataclass
class Step:
    """What is computed now: prefill chunks (request, tokens) beside decodes, or `steps` of pure decoding."""

    began: float
    chunks: list[tuple[SimRequest, int]]
    decodes: list[SimRequest]
    context: int
    steps: int = 1


@dataclass
class Ended:
    """What a step has brought: requests with their first token, and requests with their last one."""

    first: list[SimRequest] = field(default_factory=list)
    last: list[SimRequest] = field(default_factory=list)


class SimReplica:
    """An engine with `blocks` KV blocks. The fleet calls `add`, and `end` when `due` has come."""

    def __init__(
        self,
        name: str,
        timing: Timing,
        blocks: int,
        block_size: int,
        hasher: PrefixHasher,
        clock: Callable[[], float],
        eviction: str = "reuse",
    ) -> None:
        self.name = name
        self.timing = timing
        self.cache = PrefixCache(blocks, block_size, hasher, policy=eviction, clock=clock)
        self.waiting: deque[SimRequest] = deque()
        self.running: list[SimRequest] = []
        self.due: float | None = None
        self.preemptions = 0
        self.busy_s = 0.0
        self._step: Step | None = None
        self._clock = clock

    def add(self, request: SimRequest) -> None:
        """A request arrives; a run of pure decoding ends with the step that is being computed."""
        self.waiting.append(request)
        step = self._step
        if step is None:
            self._begin()
        elif not step.chunks and step.steps > 1:
            step.steps = self._steps_until(step, self._clock())
            self.due = step.began + self._duration(step)

    def end(self) -> Ended:
        """The step is over: count what it computed, and begin the next one."""
        step, ended = self._step, Ended()
        assert step is not None
        self.busy_s += self._clock() - step.began
        for request, count in step.chunks:
            if request.lease is None:
                continue  # it has just made room for one before it
            request.computed += count
            self.cache.commit(request.lease, min(request.computed, len(request.tokens)))
            if request.computed == request.num_tokens:
                self._produce(request, 1, ended)
        for request in step.decodes:
            if request.lease is not None:
                request.computed += step.steps
                self._produce(request, step.steps, ended)
        self._begin()
        return ended

    def drop_all(self) -> list[SimRequest]:
        """The replica dies: all its requests, as if never begun; its cache is gone."""
        lost = [*self.running, *self.waiting]
        for request in lost:
            request.lease, request.computed, request.produced = None, 0, 0
        self.running.clear()
        self.waiting.clear()
        self.due = self._step = None
        return lost

    def load(self) -> dict[str, Any]:
        """The figures that a replica reports to routers (LoadReport)."""
        stats = self.cache.stats()
        left = sum(request.num_tokens - request.computed for request in self.running if request.produced == 0)
        return {
            "waiting": len(self.waiting),
            "running": len(self.running),
            "waiting_tokens": left + sum(len(request.tokens) for request in self.waiting),
            "free": stats.free,
            "cached": stats.cached,
            "held": stats.held,
            "num_blocks": stats.num_blocks,
            "eviction_age_s": stats.eviction_age_s,
            "prefill_tokens_per_s": self.timing.prefill_tokens_per_s,
            "decode_step_s": self.timing.decode(8, 8 * 2048),
        }

    def _begin(self) -> None:
        """Plan the next step, if there is anything to do."""
        budget = self.timing.max_batch_tokens
        decodes = [request for request in self.running if request.computed == request.num_tokens - 1]
        decodes = [request for request in decodes if request.produced > 0]
        budget -= len(decodes)
        chunks: list[tuple[SimRequest, int]] = []
        for request in self.running:
            if request not in decodes and budget > 0:
                chunks.append((request, min(budget, request.num_tokens - request.computed)))
                budget -= chunks[-1][1]
        while self.waiting and budget > 0 and len(self.running) < self.timing.max_num_seqs:
            if not self._admit(self.waiting[0]):
                break
            request = self.waiting.popleft()
            self.running.append(request)
            chunks.append((request, min(budget, request.num_tokens - request.computed)))
            budget -= chunks[-1][1]
        if not chunks and not decodes:
            self._step = self.due = None
            return
        context = sum(request.computed for request in decodes)
        self._step = Step(self._clock(), chunks, decodes, context)
        if not chunks:
            stats = self.cache.stats()
            room = (stats.free + stats.cached) // len(decodes) * self.cache.block_size
            self._step.steps = max(1, min(room, *(r.answer_tokens - r.produced for r in decodes)))
        self.due = self._step.began + self._duration(self._step)

    def _admit(self, request: SimRequest) -> bool:
        produced = np.full(request.produced, -1, np.int32)
        tokens = np.concatenate((request.tokens, produced)) if request.produced else request.tokens
        try:
            request.lease = self.cache.claim(
                tokens, SPACE, hashes=request.hashes if not request.produced else None
            )
        except OutOfBlocks:
            return False
        request.computed = request.lease.cached_tokens
        if request.cached_tokens < 0:
            request.cached_tokens = request.lease.cached_tokens
        return True

    def _duration(self, step: Step) -> float:
        if not step.chunks:
            return self.timing.decode(len(step.decodes), step.context, step.steps)
        tokens = sum(count for _, count in step.chunks)
        pairs = sum(count * (request.computed + count / 2) for request, count in step.chunks)
        return self.timing.prefill(tokens, pairs, len(step.decodes), step.context)

    def _steps_until(self, step: Step, now: float) -> int:
        """Whole decode steps of a run until the one that is being computed now has ended."""
        rows, elapsed = len(step.decodes), now - step.began
        steps = max(1, int(elapsed / self.timing.decode(rows, step.context)) + 1)
        while steps > 1 and self.timing.decode(rows, step.context, steps - 1) >= elapsed:
            steps -= 1
        return min(steps, step.steps)

    def _produce(self, request: SimRequest, count: int, ended: Ended) -> None:
        """Count answer tokens of a request and make room for them; the last one needs none."""
        if request.first_at < 0:
            request.first_at = self._clock()
            ended.first.append(request)
        request.produced += count
        if request.produced >= request.answer_tokens:
            assert request.lease is not None
            self.cache.release(request.lease)
            request.lease = None
            self.running.remove(request)
            ended.last.append(request)
            return
        self._grow(request, count)

    def _grow(self, request: SimRequest, count: int) -> None:
        """Take the blocks for new tokens, at the cost of the youngest running request if there are none."""
        while request.lease is not None:
            try:
                self.cache.append(request.lease, np.full(count, -1, np.int32))
                return
            except OutOfBlocks:
                youngest = self.running.pop()
                assert youngest.lease is not None
                self.cache.release(youngest.lease)
                youngest.lease, youngest.computed = None, 0
                self.waiting.appendleft(youngest)
                self.preemptions += 1
