"""The FastAPI application: routes, and every failure in OpenAI's shape."""

import json
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from router.administration import Administration
from router.api import admin
from router.api.auth import AdminGate, Authenticator
from router.api.codec import Codec
from router.api.config import ApiConfig
from router.api.errors import INVALID, SERVER, ApiError, api_error, model_not_found
from router.api.exchange import ExchangeMiddleware, exchange_of
from router.api.generate import Service, chat_completions, completions
from router.api.metrics import Metrics
from router.api.pool import BodyPool
from router.api.prepare import Preparer
from router.api.schemas import DetokenizeBody, TokenizeBody, parse
from router.dispatch import Dispatcher
from router.errors import RouterError, UpstreamError

logger = logging.getLogger(__name__)

Endpoint = Callable[[Service, Request], Awaitable[Response]]


def build_api(
    config: ApiConfig,
    codec: Codec,
    dispatcher: Dispatcher,
    administration: Administration,
    metrics: Metrics | None = None,
) -> FastAPI:
    """The OpenAI-compatible API over `dispatcher`.

    Without `metrics`, new ones are made and told to observe the dispatcher. The application holds locks and
    threads, so build it in the process that serves it.

    Raises:
        ValueError: no model name was given.
    """
    if not config.model_names:
        raise ValueError("the API needs at least one model name")
    if metrics is None:
        metrics = Metrics(dispatcher.placement)
        dispatcher.observe(metrics)
    pool = BodyPool(config.body_threads, config.inline_bytes, config.max_pending_bodies)
    preparer = Preparer(config, codec, dispatcher.model_info)
    service = Service(
        config,
        dispatcher,
        preparer,
        pool,
        Authenticator(config.api_keys),
        metrics,
        AdminGate(config.admin_key),
        administration,
    )
    app = FastAPI(title="Warmroute", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for methods, path, endpoint in _ROUTES:
        app.add_route(path, partial(_serve, service, path, endpoint), methods=methods.split())
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(ExchangeMiddleware, metrics=metrics, send_request_id=config.send_request_id)
    return app


async def _models(service: Service, request: Request) -> Response:
    """`GET /v1/models`."""
    service.authenticator.tenant(request)
    cards = [_model_card(service, name) for name in service.config.model_names]
    return _json({"object": "list", "data": cards})


async def _model(service: Service, request: Request) -> Response:
    """`GET /v1/models/{id}`."""
    service.authenticator.tenant(request)
    name = request.path_params["name"]
    if name not in service.config.model_names:
        raise model_not_found(name)
    return _json(_model_card(service, name))


def _model_card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "warmroute",
        "max_model_len": service.preparer.context_length,
    }


async def _health(service: Service, request: Request) -> Response:
    """`GET /health`: 200 once a replica can take requests."""
    replicas = len(service.dispatcher.placement.stats())
    if replicas and service.dispatcher.model_info() is not None:
        return _json({"status": "ok", "replicas": replicas})
    error = ApiError(503, "No replica is ready.", kind=SERVER, code="no_replica")
    return _json({"status": "unavailable", "replicas": replicas, **error.payload}, 503)


async def _metrics(service: Service, request: Request) -> Response:
    """`GET /metrics`."""
    return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")


async def _tokenize(service: Service, request: Request) -> Response:
    """`POST /tokenize`, with vLLM's fields."""

    def answer(raw: bytes) -> Response:
        tokens = service.preparer.tokenize(parse(TokenizeBody, raw))
        limit = service.preparer.context_length
        return _json({"count": len(tokens), "max_model_len": limit, "tokens": tokens.tolist()})

    _, raw = await service.read(request)
    return await service.pool.run(answer, raw)


async def _detokenize(service: Service, request: Request) -> Response:
    """`POST /detokenize`, with vLLM's fields."""

    def answer(raw: bytes) -> Response:
        return _json({"prompt": service.preparer.detokenize(parse(DetokenizeBody, raw))})

    _, raw = await service.read(request)
    return await service.pool.run(answer, raw)


_STARTED = int(time.time())

_ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("GET", "/v1/models", _models),
    ("GET", "/v1/models/{name:path}", _model),
    ("GET", "/health", _health),
    ("GET", "/metrics", _metrics),
    ("POST", "/tokenize", _tokenize),
    ("POST", "/detokenize", _detokenize),
    ("POST", "/admin/cache/clear", admin.clear),
    ("GET POST", "/admin/cache/explain", admin.explain),
)


async def _serve(service: Service, path: str, endpoint: Endpoint, request: Request) -> Response:
    exchange = exchange_of(request.scope)
    exchange.endpoint = path
    try:
        return await endpoint(service, request)
    except RouterError as error:
        found = api_error(error)
        if isinstance(error, UpstreamError):
            logger.warning("request %s failed: %s", exchange.request_id, error)
        elif found.status == 500:
            service.metrics.internal_errors.inc()
            logger.error("request %s failed", exchange.request_id, exc_info=error)
        return _error(found)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 404:
        return _error(ApiError(404, f"Invalid URL ({where}).", code="unknown_url"))
    if error.status_code == 405:
        headers = error.headers or {}
        return _error(ApiError(405, f"Not allowed: {where}.", code="method_not_allowed", headers=headers))
    kind = INVALID if error.status_code < 500 else SERVER
    return _error(ApiError(error.status_code, str(error.detail), kind=kind, headers=error.headers))


def _error(error: ApiError) -> Response:
    return Response(error.body, error.status, error.headers, "application/json")


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), status, media_type="application/json")
