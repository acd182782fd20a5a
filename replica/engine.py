"""The engine: requests in, tokens out, one step at a time.

`add` puts a request in line, `step` = schedule, run, postprocess, `abort` takes a request out at any stage.
Nothing here knows of threads beyond one lock: `step` releases it while the model computes, so that another
thread may ask for `load()` or `updates()` meanwhile. `add`, `step` and `abort` belong to one thread.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvcore.cache import PrefixCache
from kvcore.errors import CacheError
from kvcore.fingerprint import FilterGeometry, FingerprintUpdate
from kvcore.namespace import Namespace
from replica.answer import Answer, Streamed
from replica.beam_answer import BeamAnswer
from replica.best_of import BestOf
from replica.choice import EngineTokenizer
from replica.config import EngineConfig
from replica.drafts import Drafter
from replica.errors import EngineDead, InvalidRequest, QueueFull
from replica.fingerprint_feed import FingerprintFeed
from replica.limits import Limits, longest_context
from replica.pipeline import Pipeline
from replica.plan import Plan, work
from replica.rates import Rates
from replica.request import Failure, Output, Request
from replica.runner import Draw, ForwardModel, Runner
from replica.scheduler import Scheduler
from replica.sequence import Sequence, build_sequences
from replica.step_budget import StepBudget

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFacts:
    """What routers and the cache namespace need to know of the model."""

    digest: str
    layout: str
    block_size: int
    context_length: int


class Engine:
    """Continuous batching over one model and one prefix cache.

    Args:
        config: sizes and limits, dtype and device settled.
        model: its KV must be allocated for the cache's blocks.
        tokenizer: of the same model.
        cache: idle, with the model's blocks, of `config.block_size` tokens.
        clock: seconds, monotonic.
        draw_seed: seeds for requests that bring none.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ForwardModel,
        tokenizer: EngineTokenizer,
        cache: PrefixCache,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self.config = config
        self.cache = cache
        self.tokenizer = tokenizer
        self.vocab_size = model.config.vocab_size
        context = longest_context(config, model.config.context_length, cache.num_blocks)
        self.facts = ModelFacts(model.config.digest, config.layout, config.block_size, context)
        self._attention_tokens = model.config.attention_tokens
        self.rates = Rates()
        drafter = Drafter(config.draft_tokens, context) if config.draft_tokens else None
        self.scheduler = Scheduler(
            cache, config.block_size, config.max_batch_tokens, config.max_num_seqs, drafter
        )
        self.hash_mismatches = 0
        self.drafted = self.accepted = 0
        self._lock = threading.Lock()
        self._model = model
        self.limits = Limits(context, self.vocab_size, config.max_queue)
        self._budget = StepBudget(config.max_batch_tokens, config.max_num_seqs)
        self._runner = Runner(model, config.block_size, tokenizer.eos_ids, self.vocab_size)
        self._pipeline = Pipeline(self.scheduler, self._runner, self._lock, bool(config.overlap), clock)
        self._feed = FingerprintFeed(cache, FilterGeometry.for_blocks(cache.num_blocks))
        self._answers: dict[str, Answer] = {}
        self._orders = itertools.count()
        self._draw_seed = draw_seed
        self._failed_steps = 0

    def check(self, request: Request, arriving: int = 0) -> None:
        """Raise `InvalidRequest` or `QueueFull` if `add` would now, with `arriving` more sequences in line.

        Each of a request's n choices is a sequence of its own. May be called from any thread.
        """
        self.limits.check(request)
        waiting = self.scheduler.num_waiting + arriving
        if waiting + request.sampling.width > self.config.max_queue:
            raise QueueFull(f"{waiting} of at most {self.config.max_queue} sequences are waiting already")

    def add(self, request: Request) -> None:
        """Put a request in line.

        Raises:
            InvalidRequest: it can never be served: empty or too long a prompt, tokens the model does not
                have, more choices than may wait, an adapter that is not loaded, an id that is in use.
            QueueFull: too many sequences are waiting.
        """
        self.check(request)
        if request.id in self._answers:
            raise InvalidRequest(f"request id {request.id!r} is in use")
        namespace = self.namespace(request.tenant, request.salt, request.adapter)
        hashes = self._hashes(request, namespace)
        seed = self._draw_seed() if request.sampling.seed is None else request.sampling.seed
        with self._lock:
            seqs = build_sequences(request, namespace, hashes, seed, self._orders, self.facts.context_length)
            self.scheduler.add(seqs[0])
        self._answers[request.id] = self._answer(request, seqs)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks. False when it is not (or no longer) here."""
        answer = self._answers.pop(request_id, None)
        if answer is None:
            return False
        with self._lock:
            for seq in answer.seqs:
                self.scheduler.remove(seq)
        return True

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._answers) or self._pipeline.flying

    def step(self) -> list[Output]:
        """Compute one batch and return what it adds to each choice.

        With `config.overlap` the next batch is computing by then. An error while computing fails the requests
        of this batch, not the others; `EngineDead` is raised after `config.max_failed_steps` such steps in a
        row, and at once when a rank of the model has gone.
        """
        landing = self._pipeline.turn()
        if landing is None:
            return []
        if isinstance(landing.error, EngineDead):
            raise landing.error  # some of the model's ranks are gone: there is nothing to try again with
        if landing.error is not None:
            return self._fail(landing.plan, landing.error)
        self._failed_steps = 0
        self._budget.passed()
        plan = landing.plan
        self.rates.record(plan.prefill_work(self._attention_tokens), plan.decodes, landing.seconds)
        with self._lock:
            self.scheduler.max_batch_tokens = self._budget.tokens
            spoiled = {draw.chunk.seq for draw in landing.draws if min(draw.tokens) < 0}
            self.scheduler.complete(plan, spoiled)
            return [output for draw in landing.draws for output in self._advance(draw)]

    def close(self) -> None:
        """End the other ranks of a tensor-parallel model; no step may follow."""
        self._model.close()

    def load(self) -> dict[str, Any]:
        """The figures a router needs (LoadReport). May be called from any thread."""
        with self._lock:
            room, attention = self.cache.room(), self._attention_tokens
            left = self.scheduler.uncomputed_prompts()
            return {
                "waiting": self.scheduler.num_waiting,
                "running": len(self.scheduler.running),
                "waiting_tokens": sum(count for _, count in left),
                "waiting_work": sum(work(start, count, attention) for start, count in left),
                "attention_tokens": attention,
                "free": room.free,
                "cached": room.cached,
                "held": room.held,
                "num_blocks": self.cache.num_blocks,
                "eviction_age_s": room.eviction_age_s,
                "prefill_tokens_per_s": self.rates.prefill_tokens_per_s,
                "measured_tokens": self.rates.measured_tokens,
                "decode_step_s": self.rates.decode_step_s,
                "drafted": self.drafted,
                "accepted": self.accepted,
            }

    def updates(self, epoch: int | None, seq: int) -> FingerprintUpdate | None:
        """What changed in the cache since (epoch, seq), or None. May be called from any thread."""
        return self._feed.update_since(epoch, seq)

    def clear_cache(self, namespace: Namespace | None = None) -> dict[str, int]:
        """Forget what is cached, all of it or of one namespace. May be called from any thread.

        `cleared` blocks can be hit no more, `held` of all that were ever cleared are still used by running
        sequences and die with the last of those.
        """
        with self._lock:
            before = self.cache.stats().cleared
            held = self.cache.clear(namespace)
            return {"cleared": self.cache.stats().cleared - before, "held": held}

    def namespace(
        self, tenant: str | None = None, salt: str | int | None = None, adapter: str | None = None
    ) -> Namespace:
        """The cache namespace of this model for what a request says. Raises `InvalidRequest`."""
        try:
            return Namespace(self.facts.digest, self.facts.layout, adapter, tenant, salt)
        except CacheError as error:
            raise InvalidRequest(str(error)) from error

    def _answer(self, request: Request, seqs: list[Sequence]) -> Answer:
        context = self.facts.context_length
        if request.sampling.use_beam_search:
            return BeamAnswer(request, seqs, self.tokenizer, context, self.scheduler)
        streamed = Streamed(request, seqs, self.tokenizer, context)
        return BestOf(streamed) if request.sampling.ranked else streamed

    def _hashes(self, request: Request, namespace: Namespace) -> np.ndarray:
        """Computed here, which is cheap, rather than believed: a router with another secret must not harm."""
        hasher = self.cache.hasher
        hashes = hasher.block_hashes(request.tokens, self.config.block_size, hasher.root(namespace))
        if request.hashes is not None and not np.array_equal(request.hashes, hashes):
            self.hash_mismatches += 1
            if self.hash_mismatches == 1:
                logger.warning("a router's prefix hashes differ from this replica's: check the hash secret")
        return hashes

    def _advance(self, draw: Draw) -> list[Output]:
        """Take what was drawn for one sequence; nothing when it has ended while the step ran."""
        seq, outputs, kept = draw.seq, list[Output](), 0
        answer = self._answer_of(seq)
        if answer is None or seq.finish_reason is not None:
            return []
        for token, logprobs in zip(draw.tokens, draw.logprobs, strict=True):
            if token < 0:
                message = "the model computed NaN or infinite logits for this request"
                return [*outputs, self._give_up(answer, message)]
            outputs += answer.take(seq, token, logprobs, self.cache.epoch, self.cache.seq)
            kept += 1
            self.scheduler.settle(draw.chunk, seq, token)
            if seq.finish_reason is not None:
                break  # what was drawn after the end of the answer never was
        if draw.chunk.drafts:
            self.scheduler.accept(draw.chunk, kept)
            self.drafted += len(draw.chunk.drafts)
            self.accepted += kept - 1
        self._let_go(seq, answer)
        return outputs

    def _let_go(self, seq: Sequence, answer: Answer) -> None:
        """Free the blocks of a choice that has ended, and forget an answer that is complete."""
        if seq.finish_reason is not None:
            self.scheduler.remove(seq)
        if answer.done:
            for other in answer.seqs:
                self.scheduler.remove(other)
            del self._answers[answer.request.id]

    def _answer_of(self, seq: Sequence) -> Answer | None:
        """None once its request is over, even if another one has its id by now."""
        answer = self._answers.get(seq.request.id)
        return answer if answer is not None and answer.request is seq.request else None

    def _fail(self, plan: Plan, error: Exception) -> list[Output]:
        self._failed_steps += 1
        logger.error("a step of %d sequences failed", len(plan.chunks), exc_info=error)
        message = f"the engine failed while computing this request: {type(error).__name__}: {error}"
        if isinstance(error, torch.OutOfMemoryError):
            traceback.clear_frames(error.__traceback__)  # which hold what the step had computed
            message = self._make_room(plan)
        with self._lock:
            self.scheduler.max_batch_tokens = self._budget.tokens
            answers = [self._answer_of(chunk.seq) for chunk in plan.chunks]
            failed = dict.fromkeys(answer for answer in answers if answer is not None)
            outputs = [self._give_up(answer, message) for answer in failed]
        if self._failed_steps >= self.config.max_failed_steps:
            raise EngineDead(f"{self._failed_steps} steps in a row failed, last: {error}") from error
        return outputs

    def _make_room(self, plan: Plan) -> str:
        """Steps get smaller for a while after one for which the memory was too small; what to tell of it."""
        if self._budget.halve():
            self._failed_steps -= 1  # there is something left to try
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        logger.warning("out of memory: steps have %d tokens at most for a while", self._budget.tokens)
        return (
            f"the device ran out of memory in a step of {plan.num_tokens} tokens; this replica needs a lower "
            f"max_batch_tokens ({self.config.max_batch_tokens}) or memory_share ({self.config.memory_share})"
        )

    def _give_up(self, answer: Answer, message: str) -> Output:
        for seq in answer.seqs:
            self.scheduler.remove(seq)
        del self._answers[answer.request.id]
        return Output(answer.request.id, failure=Failure("internal", message))
