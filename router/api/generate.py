"""From an HTTP request to an answer: authenticate, read, prepare, dispatch, render; for both endpoints."""

import json
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from router.administration import Administration
from router.api.answers import Form, Usage, put_together
from router.api.auth import AdminGate, Authenticator
from router.api.body import read_body
from router.api.chat import ChatForm
from router.api.completions import CompletionForm
from router.api.config import ApiConfig
from router.api.errors import ApiError, api_error, internal
from router.api.exchange import ClientWatch, Exchange, exchange_of
from router.api.feed import Feed, collect
from router.api.metrics import Metrics
from router.api.pool import BodyPool
from router.api.prepare import Preparer
from router.api.schemas import ChatBody, CompletionBody, GenerationBody, parse
from router.api.sse import DONE, EventStream, error_event
from router.dispatch import Dispatcher, PreparedRequest
from router.errors import RouterError
from router.stream import Stream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Service:
    """What the endpoints work with."""

    config: ApiConfig
    dispatcher: Dispatcher
    preparer: Preparer
    pool: BodyPool
    authenticator: Authenticator
    metrics: Metrics
    admin_gate: AdminGate
    replicas: Administration

    def administration(self, request: Request) -> Administration:
        """The way to the replicas, for who has the admin key. Raises `ApiError`."""
        self.admin_gate.check(request)
        return self.replicas

    async def read(self, request: Request) -> tuple[str | None, bytes]:
        """The caller's tenant, and the body. Raises `ApiError`."""
        tenant = self.authenticator.tenant(request)
        return tenant, await read_body(request, self.config.max_body_bytes, self.config.body_timeout_s)


_Prepared = tuple[GenerationBody, list[PreparedRequest]]


@dataclass(frozen=True)
class _Job:
    """One client request, checked and tokenized."""

    service: Service
    exchange: Exchange
    body: GenerationBody
    requests: list[PreparedRequest]

    def form(self) -> Form:
        name, choices = self.body.model, self.body.n or 1
        kind = ChatForm if isinstance(self.body, ChatBody) else CompletionForm
        return kind(self.requests[0].id, name, choices, self.include_usage)

    @property
    def include_usage(self) -> bool:
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)


async def chat_completions(service: Service, request: Request) -> Response:
    """`POST /v1/chat/completions`."""
    return await _answer(service, request, _prepare_chat)


async def completions(service: Service, request: Request) -> Response:
    """`POST /v1/completions`."""
    return await _answer(service, request, _prepare_completion)


def _prepare_chat(preparer: Preparer, tenant: str | None, raw: bytes) -> _Prepared:
    body = parse(ChatBody, raw)
    return body, [preparer.chat(body, tenant)]


def _prepare_completion(preparer: Preparer, tenant: str | None, raw: bytes) -> _Prepared:
    body = parse(CompletionBody, raw)
    return body, preparer.completion(body, tenant)


async def _answer(
    service: Service, request: Request, prepare: Callable[[Preparer, str | None, bytes], _Prepared]
) -> Response:
    tenant, raw = await service.read(request)
    watch = ClientWatch(request.receive)
    try:
        prepared = service.pool.run(partial(prepare, service.preparer, tenant), raw)
        job = _Job(service, exchange_of(request.scope), *await watch.guard(prepared))
        if job.body.stream:
            return await _streamed(job, watch)
        response = await watch.guard(_whole(job))
    except BaseException:  # also when the server cancels this task
        watch.stop()
        raise
    watch.stop()
    return response


async def _whole(job: _Job) -> Response:
    service = job.service
    results = await collect(service.dispatcher, job.requests, service.config.prompt_window)
    streams = [result.stream for result in results]
    service.metrics.ttft.observe(min(s.started_at for s in streams) - job.exchange.started_at)
    _finished(job, streams)
    answers = [put_together(result.deltas, job.body.n or 1) for result in results]
    content = json.dumps(job.form().whole(answers, Usage.of(streams)), separators=(",", ":"))
    return Response(content, media_type="application/json", headers=_headers(streams[0]))


async def _streamed(job: _Job, watch: ClientWatch) -> Response:
    dispatcher, config = job.service.dispatcher, job.service.config
    feed = Feed(dispatcher, job.requests, config.prompt_window)
    try:
        first = await watch.guard(feed.open())
    except BaseException:  # whatever ends the wait, nothing may stay reserved
        feed.close()
        raise
    job.service.metrics.ttft.observe(first.started_at - job.exchange.started_at)
    limit_s = dispatcher.limits.request_timeout_s + config.stall_timeout_s
    return EventStream(_frames(job, feed), watch, feed.close, limit_s, _headers(first))


async def _frames(job: _Job, feed: Feed) -> AsyncGenerator[bytes, None]:
    form = job.form()
    try:
        if opening := form.opening():
            yield opening
        async for prompt, delta in feed.deltas():
            if frame := form.delta(prompt, delta):
                yield frame
    except RouterError as error:
        yield _failed(job, api_error(error), error)
        return
    except Exception as error:
        # The status is sent already; the client must still hear of it, and the log gets the traceback.
        job.service.metrics.internal_errors.inc()
        logger.exception("request %s failed while streaming", job.exchange.request_id)
        yield _failed(job, internal(), error)
        return
    _finished(job, feed.streams)
    if job.include_usage:
        yield form.usage(Usage.of(feed.streams))
    yield DONE


def _failed(job: _Job, error: ApiError, cause: BaseException) -> bytes:
    job.exchange.status = error.status
    logger.warning("request %s ended early: %s", job.exchange.request_id, cause)
    return error_event(error)


def _finished(job: _Job, streams: list[Stream]) -> None:
    metrics = job.service.metrics
    metrics.e2e.observe(job.exchange.elapsed_s)
    for stream in streams:
        metrics.prompt_tokens.observe(stream.prompt_tokens)
        metrics.completion_tokens.observe(stream.completion_tokens)


def _headers(stream: Stream) -> dict[str, str]:
    """What the router did; for several prompts, of the first that started."""
    found = {
        "replica": stream.replica_id,
        "predicted-tokens": str(stream.predicted_tokens),
        "cached-tokens": str(stream.cached_tokens),
        "reason": stream.reason,
    }
    # Replicas name themselves; a header must not break on a strange name.
    return {f"x-warmroute-{k}": v.encode("ascii", "replace").decode().strip() for k, v in found.items()}
