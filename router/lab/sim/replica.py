"""One simulated engine: the real prefix cache, chunked prefill and continuous batching, timed by a model.

A step takes decodes first; half of what they leave of the token budget is an express lane for prompts that it
can finish in this step, shortest first; then started prefills go on and waiting requests are admitted, oldest
first. A request whose next block is being computed by another waits for it. (So schedules `replica/`; without
`express`, first come, first served, as most other engines do.)

Steps of pure decoding are taken many at once, until a request ends or a new one comes, and decodes beside
prefill chunks cost nothing, so the cost of a simulation grows with requests and prefill chunks, not with
answer tokens. Answers take blocks but are never published: a trace does not say what was answered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.cache import PrefixCache
from kvcore.errors import OutOfBlocks
from kvcore.events import BlocksRemoved
from kvcore.lease import Lease
from router.lab.sim.decodes import Decodes
from router.lab.sim.line import Line
from router.lab.sim.request import HASHER, SPACE, SimRequest
from router.lab.sim.tiers import TierConfig, Tiers
from router.lab.sim.timing import Timing

_EXPRESS_LINE = 16  # how far into the line the express lane looks, as in replica/scheduler.py
_ANSWER = np.full(1 << 17, -1, np.int32)


@dataclass
class Step:
    """What is computed now: prefill chunks (request, tokens) beside decodes, or `steps` of pure decoding."""

    began: float
    chunks: list[tuple[SimRequest, int]]
    load_s: float = 0.0
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
        timing: Timing,
        blocks: int,
        block_size: int,
        clock: Callable[[], float],
        eviction: str = "reuse",
        express: bool = True,
        tiers: Sequence[TierConfig] = (),
    ) -> None:
        self.timing = timing
        self.cache = PrefixCache(blocks, block_size, HASHER, policy=eviction, clock=clock)
        self.tiers = Tiers(tiers, timing.kv_bytes * block_size) if tiers else None
        self.waiting = Line(self.cache, timing.attention)
        self.prefilling: list[SimRequest] = []
        self.decoding = Decodes(block_size)
        self.due: float | None = None
        self.preemptions = 0
        self.busy_s = 0.0
        self._express = express
        self._step: Step | None = None
        self._load_s = 0.0
        self._sunk = 0
        self._clock = clock
        self._rates = {
            "attention_tokens": 1 / timing.attention if timing.attention else 0,
            "prefill_tokens_per_s": timing.prefill_tokens_per_s,
            "decode_step_s": timing.decode(8, 8 * 2048),
        }

    @property
    def requests(self) -> list[SimRequest]:
        """All that are here."""
        return [*self.decoding, *self.prefilling, *self.waiting]

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
        self.decoding.step(step.steps)
        for request, count in step.chunks:
            if request.lease is None:
                continue  # it has just made room for one before it
            request.computed += count
            self.cache.commit(request.lease, min(request.computed, len(request.tokens)))
            if request.computed == request.num_tokens:
                self.prefilling.remove(request)
                self._first_token(request, ended)
        for request in self.decoding.due():
            if request.produced < request.answer_tokens:
                self._grow(request)
            else:
                self.decoding.remove(request)
                self._finish(request, ended)
        if self.tiers is not None:
            self._sink(self.tiers)
        self._begin()
        return ended

    def drop_all(self) -> list[SimRequest]:
        """The replica dies: all its requests, as they stand for their clients."""
        lost = [*self.decoding.leave(), *self.prefilling, *self.waiting.leave()]
        self.prefilling.clear()
        for request in lost:
            if request.lease is not None:
                self.cache.release(request.lease)
            request.forget_progress()
        self.cache.clear()
        self.due = self._step = None
        return lost

    def load(self) -> dict[str, Any]:
        """The figures that a replica reports to routers (LoadReport)."""
        room, attention = self.cache.room(), self.timing.attention
        waiting_tokens, work = self.waiting.tokens, self.waiting.work
        for request in self.prefilling:
            total, count = request.num_tokens, request.left()
            waiting_tokens += count
            work += count * (1 + (total - count / 2) * attention)
        return {
            "waiting": len(self.waiting),
            "running": len(self.prefilling) + len(self.decoding),
            "waiting_tokens": waiting_tokens,
            "waiting_work": work,
            "free": room.free,
            "cached": room.cached,
            "held": room.held,
            "num_blocks": self.cache.num_blocks,
            "eviction_age_s": room.eviction_age_s,
            **self._rates,
        }

    def _begin(self) -> None:
        """Plan the next step, if there is anything to do."""
        rows = len(self.decoding)
        budget = self.timing.max_batch_tokens - rows
        chunks: dict[SimRequest, int] = {}
        if self._express and len(self.waiting) + len(self.prefilling) > 1:
            budget -= self._overtake(chunks, budget // 2)
        for request in self.prefilling:
            if budget > 0 and request not in chunks:
                chunks[request] = min(budget, request.num_tokens - request.computed)
                budget -= chunks[request]
        if self.waiting:
            self._admit(chunks, budget)
        if not chunks and not rows:
            self._step = self.due = None
            return
        self._step = Step(self._clock(), list(chunks.items()), self._load_s)
        self._load_s = 0.0
        if not chunks:
            room = self.cache.available // rows * self.cache.block_size
            self._step.steps = max(1, min(room, self.decoding.until_end()))
        self.due = self._step.began + self._duration(self._step)

    def _overtake(self, chunks: dict[SimRequest, int], lane: int) -> int:
        """Finish the prompts with the least left, `lane` tokens at most; returns the tokens taken."""
        spent = 0
        candidates = [*self._ready_in_line(), *self.prefilling]
        if len(candidates) < 2:
            return 0
        for request in sorted(candidates, key=SimRequest.left):
            if spent + request.left() > lane:
                break
            if request.lease is None:
                if self._computed_elsewhere(request):
                    continue
                if not self._claim(request):
                    break
            left = request.num_tokens - request.computed
            if spent + left <= lane:  # what was seen in the cache may be gone by the claim
                chunks[request] = left
                spent += left
        return spent

    def _ready_in_line(self) -> list[SimRequest]:
        """The first of the line that need not wait for another; none while the first one lacks blocks."""
        ready: list[SimRequest] = []
        for request in self.waiting.first(_EXPRESS_LINE):
            if self._computed_elsewhere(request):
                continue
            if not ready and not self._fits(request):
                return []
            ready.append(request)
        return ready

    def _admit(self, chunks: dict[SimRequest, int], budget: int) -> None:
        for request in self.waiting.requests.copy():
            if budget <= 0:
                return
            if self._express:
                self.waiting.look(request)
                if self._computed_elsewhere(request):
                    continue
            if not self._claim(request):
                return  # nobody overtakes the one that lacks blocks
            chunks[request] = min(budget, request.num_tokens - request.computed)
            budget -= chunks[request]

    def _computed_elsewhere(self, request: SimRequest) -> bool:
        """Whether a running request is computing the next block that this one lacks."""
        missing = request.hit // self.cache.block_size
        if missing >= len(request.hashes):
            return False
        wanted, end = request.hashes[missing], (missing + 1) * self.cache.block_size
        for other in self.prefilling:  # asked so often that a generator would cost much
            if other.computed < end and len(other.hashes) > missing and other.hashes[missing] == wanted:
                return True
        return False

    def _fits(self, request: SimRequest) -> bool:
        size = self.cache.block_size
        running = len(self.prefilling) + len(self.decoding)
        needed = -(-request.num_tokens // size) - request.hit // size
        return running == 0 or needed + running <= self.cache.available

    def _claim(self, request: SimRequest) -> bool:
        running = len(self.prefilling) + len(self.decoding)
        if running >= self.timing.max_num_seqs or not self._fits(request):
            return False
        tokens, hashes = request.tokens, request.hashes
        if request.produced:
            tokens = np.concatenate((tokens, _ANSWER[: request.produced]))
            hashes = self._with_answer(hashes, tokens)
        try:
            lease = self.cache.claim(tokens, SPACE, hashes=hashes)
        except OutOfBlocks:
            return False
        self.waiting.remove(request)
        request.lease, request.computed = lease, lease.cached_tokens
        loaded = 0 if self.tiers is None else self._raise(request, self.tiers)
        if request.cached_tokens < 0:
            request.cached_tokens, request.loaded_tokens = request.computed, loaded
        self.prefilling.append(request)
        return True

    def _with_answer(
        self, hashes: npt.NDArray[np.uint64], tokens: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.uint64]:
        """The hashes of a prompt, which a trace may have named by its ids, and those of what was answered."""
        size = self.cache.block_size
        root = int(hashes[-1]) if len(hashes) else HASHER.root(SPACE)
        return np.concatenate((hashes, HASHER.block_hashes(tokens[len(hashes) * size :], size, root)))

    def _raise(self, request: SimRequest, tiers: Tiers) -> int:
        """Load what lower tiers have of a claimed request, so many tokens, instead of computing them."""
        size = self.cache.block_size
        depth = request.computed // size
        count, seconds = tiers.load(request.hashes[depth:].tolist())
        loaded = min((depth + count) * size, request.num_tokens - 1) - request.computed
        if loaded <= 0:
            return 0
        request.computed += loaded
        self._load_s += seconds
        return loaded

    def _sink(self, tiers: Tiers) -> None:
        events = self.cache.events.since(self.cache.epoch, self._sunk) or []
        self._sunk = self.cache.seq
        for event in events:
            if isinstance(event, BlocksRemoved):
                tiers.sink(event.hashes.tolist())

    def _duration(self, step: Step) -> float:
        if not step.chunks:
            return self.timing.decode(len(self.decoding), self.decoding.context, step.steps)
        tokens, pairs = 0, 0.0
        for request, count in step.chunks:
            tokens += count
            pairs += count * (request.computed + count / 2)
        return step.load_s + self.timing.prefill(tokens, pairs, len(self.decoding), self.decoding.context)

    def _steps_until(self, step: Step, now: float) -> int:
        """Whole decode steps of a run until the one that is being computed now has ended."""
        rows, context, elapsed = len(self.decoding), self.decoding.context, now - step.began
        steps = max(1, int(elapsed / self.timing.decode(rows, context)) + 1)
        while steps > 1 and self.timing.decode(rows, context, steps - 1) >= elapsed:
            steps -= 1
        return min(steps, step.steps)

    def _first_token(self, request: SimRequest, ended: Ended) -> None:
        """All before the next token is computed: it comes, and if it is not the last one, decoding begins."""
        if request.first_at < 0:
            request.first_at = self._clock()
            ended.first.append(request)
        request.produced += 1
        if request.produced < request.answer_tokens:
            self.decoding.add(request)
            self._grow(request)
        else:
            self._finish(request, ended)

    def _finish(self, request: SimRequest, ended: Ended) -> None:
        """The last token has come; it needs no block."""
        assert request.lease is not None
        self.cache.release(request.lease)
        request.lease = None
        ended.last.append(request)

    def _grow(self, request: SimRequest) -> None:
        """Take the blocks for new tokens, at the cost of the youngest running request if there are none."""
        while request.lease is not None:
            try:
                self._append(request, request.lease)
                self.decoding.plan(request)
                return
            except OutOfBlocks:
                self._preempt(self.prefilling.pop() if self.prefilling else self.decoding.pop())

    def _append(self, request: SimRequest, lease: Lease) -> None:
        """Tell the cache of new tokens, where they need blocks: nothing else of them matters to it."""
        if request.num_tokens > len(lease.blocks) * self.cache.block_size:
            self.cache.append(lease, _ANSWER[: request.num_tokens - len(lease)])

    def _preempt(self, youngest: SimRequest) -> None:
        assert youngest.lease is not None
        self.cache.release(youngest.lease)
        youngest.forget_progress()
        self.waiting.put_back(youngest)
        self.preemptions += 1
