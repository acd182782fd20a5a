"""Replaying requests against an endpoint, open loop on the trace's clock or closed loop.

Both loops keep the order within a session: a turn is sent only after the one before it has ended (in an open
loop as long after it as the trace says, where it says so). In a closed
loop `concurrency` requests are in flight, and the next one is always the earliest of the trace that may
start. In an open loop every request starts at its time, whatever the endpoint does, divided by `speed`.

The ideal hit rate needs the prompts' tokens. They are had after the timed part, so that counting disturbs
nothing: token ids as they are, text from the endpoint's `POST /tokenize`. Where there is none, the bytes of
the prompt stand in: the common prefix in bytes, as a share of the prompt, times the prompt's tokens in
`usage`. That estimate is good where text is even, and takes a chat template's own tokens for part of the
messages.
"""

import asyncio
import contextlib
import heapq
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from router.lab.blocks import TokenIds
from router.lab.client import Client, Outcome, Sampling, ServedModel, Target
from router.lab.errors import OptionError, TraceError
from router.lab.ideal import ideal_hits
from router.lab.record import Request
from router.lab.report import Report, summarize

_log = logging.getLogger(__name__)
_TOKENIZE_AT_ONCE = 4
_DEFAULT_CONCURRENCY = 8

Progress = Callable[[int, int, int], None]
"""Called with (ended, total, failed), once before the first request and after each."""


@dataclass(frozen=True)
class ReplayOptions:
    """How to send: give `concurrency` for a closed loop, or `speed` for an open one, or neither.

    Neither is a closed loop with eight in flight. `timeout_s` bounds each request from sending to its end.
    `context_length` (tokens) overrides what the endpoint says; token prompts that do not fit it are not
    sent. `policy` labels the report.
    """

    concurrency: int | None = None
    speed: float | None = None
    limit: int | None = None
    timeout_s: float = 300.0
    context_length: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    policy: str | None = None

    @property
    def in_flight(self) -> int:
        """Requests in flight in a closed loop."""
        return self.concurrency or _DEFAULT_CONCURRENCY

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.speed is not None:
            raise OptionError(
                "--speed is for an open loop and --concurrency for a closed one: give one of them"
            )
        _check_positive("concurrency", self.concurrency)
        _check_positive("speed", self.speed)
        _check_positive("limit", self.limit)
        _check_positive("timeout", self.timeout_s)
        _check_positive("context length", self.context_length)
        _check_positive("max tokens", self.sampling.max_tokens)


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise OptionError(f"the {name} must be a positive number, not {value}")


@dataclass(frozen=True)
class _Plan:
    """When each request may start, in seconds after the beginning, and how many may be in flight at once.

    A turn with a `think_s` starts so long after the end of the turn before it instead.
    """

    due_s: Sequence[float]
    think_s: Sequence[float | None]
    in_flight: int | None

    def due_after(self, turn: int, ended_s: float) -> float:
        """When a turn may start whose session's last one ended at `ended_s`."""
        think_s = self.think_s[turn]
        return self.due_s[turn] if think_s is None else ended_s + think_s


async def replay(
    requests: Iterable[Request],
    target: Target,
    options: ReplayOptions | None = None,
    progress: Progress | None = None,
    stop: asyncio.Event | None = None,
) -> Report:
    """Send `requests` to `target` and report what it was like.

    Setting `stop` ends the replay early: what is in flight is cancelled (errors `interrupted`), and the
    report is of what was sent. Raises TargetError if the endpoint cannot be used at all, OptionError if
    options and trace contradict each other, TraceError if the trace is wrong or empty.
    """
    options, stop = options or ReplayOptions(), stop or asyncio.Event()
    wanted = list(islice(requests, options.limit))
    if not wanted:
        raise TraceError("trace", None, "there is no request in it")
    _check_clock(wanted, options)
    async with Client(target, options.timeout_s) as client:
        model = await client.served_model()
        fitting = [request for request in wanted if _fits(request, model, options)]
        run = _Run(client, model.name, options.sampling, fitting, progress)
        stopped = await run.until_done(_plan(fitting, options), stop)
        ideal = await _ideal_hit_rate(client, model.name, run, stop)
    over_context = len(wanted) - len(fitting)
    outcomes = list(run.outcomes.values())
    return summarize(outcomes, ideal, over_context=over_context, policy=options.policy, interrupted=stopped)


def _check_clock(requests: Sequence[Request], options: ReplayOptions) -> None:
    if options.speed is None:
        return
    later = set(_next_turns(requests).values())
    if any(
        request.timestamp_s is None and (request.think_s is None or index not in later)
        for index, request in enumerate(requests)
    ):
        raise OptionError(
            "the trace has requests without timestamps; replay it with --concurrency, not --speed"
        )


def _plan(requests: Sequence[Request], options: ReplayOptions) -> _Plan:
    speed, count = options.speed, len(requests)
    if speed is None:
        return _Plan([0.0] * count, [None] * count, options.in_flight)
    due_s = [(request.timestamp_s or 0.0) / speed for request in requests]
    think_s = [None if request.think_s is None else request.think_s / speed for request in requests]
    return _Plan(due_s, think_s, None)


def _fits(request: Request, model: ServedModel, options: ReplayOptions) -> bool:
    """Whether prompt and answer fit the context, as far as both are known before sending."""
    context = options.context_length or model.context_length
    if request.num_tokens is None or context is None:
        return True
    return request.num_tokens + (request.max_tokens or options.sampling.max_tokens) <= context


class _Run:
    """The sending of a list of requests; `outcomes` maps a request's index to what became of it, by start."""

    def __init__(
        self,
        client: Client,
        model: str,
        sampling: Sampling,
        requests: Sequence[Request],
        progress: Progress | None,
    ) -> None:
        self.requests = requests
        self.outcomes: dict[int, Outcome] = {}
        self._client = client
        self._model = model
        self._sampling = sampling
        self._progress = progress or (lambda ended, total, failed: None)
        self._next_turn = _next_turns(requests)
        self._ended: asyncio.Queue[int | None] = asyncio.Queue()  # indexes; None says stop

    async def until_done(self, plan: _Plan, stop: asyncio.Event) -> bool:
        """Send everything; True if `stop` cut it short."""
        later_turns = set(self._next_turn.values())
        ready = [(due, index) for index, due in enumerate(plan.due_s) if index not in later_turns]
        heapq.heapify(ready)
        running: dict[int, asyncio.Task[None]] = {}
        began = time.perf_counter()
        count = failed = 0
        self._progress(0, len(self.requests), 0)
        async with self._told_of(stop):
            try:
                while ready or running:
                    wait_s = self._start_due(ready, running, plan.in_flight, time.perf_counter() - began)
                    index = await _get(self._ended, wait_s)
                    if stop.is_set():
                        return True
                    if index is None:
                        continue  # the next one is due
                    self._note_fault(index, running.pop(index).exception())
                    count, failed = count + 1, failed + (self.outcomes[index].error is not None)
                    self._progress(count, len(self.requests), failed)
                    if index in self._next_turn:
                        following = self._next_turn[index]
                        heapq.heappush(
                            ready, (plan.due_after(following, time.perf_counter() - began), following)
                        )
                return False
            finally:
                await _cancel(running.values())
                self._mark_interrupted(running)

    def _start_due(
        self,
        ready: list[tuple[float, int]],
        running: dict[int, asyncio.Task[None]],
        in_flight: int | None,
        now_s: float,
    ) -> float | None:
        """Start what may start; return the seconds until the next is due, None if an end must come first."""
        while ready and (in_flight is None or len(running) < in_flight):
            due, index = ready[0]
            if due > now_s:
                return due - now_s
            heapq.heappop(ready)
            running[index] = self._start(index)
        return None

    def _start(self, index: int) -> asyncio.Task[None]:
        outcome = self.outcomes[index] = Outcome(start_s=time.perf_counter())
        sending = self._client.send(self.requests[index], self._model, self._sampling, outcome)
        task = asyncio.create_task(sending)
        task.add_done_callback(lambda _: self._ended.put_nowait(index))
        return task

    def _note_fault(self, index: int, fault: BaseException | None) -> None:
        """What no client foresaw fails its request only: the rest was measured, and is to be measured."""
        if fault is not None:
            _log.error("request %d: unexpected error", index, exc_info=fault)
            outcome = self.outcomes[index]
            outcome.error, outcome.detail, outcome.end_s = "unexpected", repr(fault), time.perf_counter()

    def _mark_interrupted(self, indexes: Iterable[int]) -> None:
        """Close the outcomes of requests that were cancelled before they ended."""
        for outcome in (self.outcomes[index] for index in indexes):
            if not outcome.end_s:
                outcome.error, outcome.end_s = "interrupted", time.perf_counter()

    @contextlib.asynccontextmanager
    async def _told_of(self, stop: asyncio.Event) -> AsyncIterator[None]:
        """While inside, setting `stop` wakes whoever waits for an end."""

        async def watch() -> None:
            await stop.wait()
            self._ended.put_nowait(None)

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            await _cancel([watcher])


def _next_turns(requests: Sequence[Request]) -> dict[int, int]:
    """For each turn that has one, the index of the next turn of its session."""
    latest: dict[str, int] = {}
    following: dict[int, int] = {}
    for index, request in enumerate(requests):
        if request.session_id is not None:
            if request.session_id in latest:
                following[latest[request.session_id]] = index
            latest[request.session_id] = index
    return following


async def _get(queue: "asyncio.Queue[int | None]", timeout_s: float | None) -> int | None:
    """The next item, or None after `timeout_s` seconds."""
    try:
        return await asyncio.wait_for(queue.get(), timeout_s)
    except asyncio.TimeoutError:
        return None


async def _cancel(tasks: Iterable["asyncio.Task[None]"]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _ideal_hit_rate(client: Client, model: str, run: _Run, stop: asyncio.Event) -> float | None:
    """Ideal hits over prompt tokens, of requests that ended well; all that were sent before count as seen."""
    prompts = await _tokens(client, model, [run.requests[index] for index in run.outcomes], stop)
    outcomes = list(run.outcomes.values())
    weights: list[float] = [1.0] * len(outcomes)
    if prompts is None:
        prompts = [_stand_in(run.requests[index]) for index in run.outcomes]
        weights = [(o.prompt_tokens or 0) / max(1, len(p)) for o, p in zip(outcomes, prompts, strict=True)]
    hits = total = 0.0
    for outcome, prompt, hit, weight in zip(outcomes, prompts, ideal_hits(prompts), weights, strict=True):
        if outcome.error is None and outcome.prompt_tokens is not None:
            hits += min(weight * hit, weight * len(prompt) - 1)
            total += weight * len(prompt)
    return hits / total if total else None


async def _tokens(
    client: Client, model: str, requests: Sequence[Request], stop: asyncio.Event
) -> list[TokenIds] | None:
    """The tokens of every prompt, or None where the endpoint cannot tell those of one, or `stop` is set."""
    limit = asyncio.Semaphore(_TOKENIZE_AT_ONCE)
    unknown = False

    async def one(request: Request) -> TokenIds | None:
        nonlocal unknown
        async with limit:
            give_up = unknown or stop.is_set()  # whoever pressed Ctrl-C waits for the report
            tokens = None if give_up else await client.tokenize(request, model)
            unknown = unknown or tokens is None
            return tokens

    found = await asyncio.gather(*(one(request) for request in requests))
    known = [tokens for tokens in found if tokens is not None]
    if len(known) == len(requests):
        return known
    why = "the replay was stopped" if stop.is_set() else "the endpoint does not tokenize"
    _log.warning("%s; the ideal hit rate is estimated from the bytes of the prompts", why)
    return None


def _stand_in(request: Request) -> TokenIds:
    """A prompt whose tokens are unknown, as its bytes, int32[n]: they share beginnings as the tokens do."""
    known = request.known_tokens()
    return np.frombuffer(request.rendered(), np.uint8).astype(np.int32) if known is None else known
