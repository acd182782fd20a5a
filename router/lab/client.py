"""One endpoint, seen as its clients see it: HTTP, server-sent events, and a clock.

Anything that speaks OpenAI's protocol will do. `Client` asks what the endpoint serves, sends one request and
times its stream, and counts tokens where the endpoint offers `POST /tokenize` (as vLLM does).
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from router.lab.blocks import TokenIds
from router.lab.errors import OptionError, TargetError
from router.lab.record import Request

_log = logging.getLogger(__name__)

REPLICA_HEADER, REASON_HEADER = "x-warmroute-replica", "x-warmroute-reason"
_NO_SUCH_ROUTE = (404, 405, 501)


@dataclass(frozen=True)
class Target:
    """An OpenAI-compatible endpoint: base URL with or without `/v1`; `model` None is the first served."""

    url: str
    model: str | None = None
    api_key: str | None = None

    @property
    def root(self) -> str:
        """The URL above `/v1`, without a slash at the end."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True)
class ServedModel:
    """What GET /v1/models says; `context_length` (tokens; vLLM's `max_model_len`) may be None."""

    name: str
    context_length: int | None = None


@dataclass(frozen=True)
class Sampling:
    """What goes into every request: `max_tokens` where the trace has none, and how to sample."""

    max_tokens: int = 16
    temperature: float = 0.0
    ignore_eos: bool = False


@dataclass(slots=True)
class Outcome:
    """What became of one request; times in seconds on the replay's clock, None where it did not happen."""

    start_s: float
    end_s: float = 0.0
    first_s: float | None = None  # first content
    last_s: float | None = None  # latest content
    pieces: int = 0  # chunks with content
    finished: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    replica: str | None = None
    reason: str | None = None  # why that replica
    error: str | None = None  # its kind
    detail: str = ""


class _Refused(Exception):
    """The endpoint answered a request with an error; `kind` is what the report counts it under."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        super().__init__(detail)


class Client:
    """An open connection pool to a target; `async with` closes it."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        if not target.url.startswith(("http://", "https://")):
            raise OptionError(f"the URL must begin with http:// or https://, not {target.url!r}")
        headers = {b"Content-Type": b"application/json"}
        if target.api_key:
            if not target.api_key.isprintable():
                raise OptionError("the API key holds characters that no HTTP header can carry")
            headers[b"Authorization"] = f"Bearer {target.api_key}".encode()
        # Servers close idle connections after about 5 s; reusing one just then would look like an error.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
        timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s))
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, follow_redirects=True)
        self._target = target
        self._timeout_s = timeout_s

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def served_model(self) -> ServedModel:
        """The model to ask for; raises TargetError if the endpoint cannot be used at all."""
        url = f"{self._target.root}/v1/models"
        try:
            response = await self._http.get(url, timeout=min(30.0, self._timeout_s))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TargetError(f"cannot reach {url}: {error or type(error).__name__}") from error
        name = self._target.model
        if name is not None and response.status_code in _NO_SUCH_ROUTE:
            return ServedModel(name)
        if response.status_code != 200:
            raise TargetError(f"{url}: {_explain_status(response)}")
        models = _listed(response)
        if name is None and not models:
            raise TargetError(f"{url} lists no model; name one with --model")
        served = [model["id"] for model in models]
        if name is not None and served and name not in served:
            raise TargetError(f"{self._target.root} serves {', '.join(served[:8])}, not {name}")
        name = served[0] if name is None else name
        entry = next((model for model in models if model["id"] == name), {})
        return ServedModel(name, _count(entry.get("max_model_len")))

    async def send(self, request: Request, model: str, sampling: Sampling, outcome: Outcome) -> None:
        """Send one request and read its stream to the end; what happens, errors too, goes into `outcome`."""
        try:
            await asyncio.wait_for(self._stream(request, model, sampling, outcome), self._timeout_s)
        except (asyncio.TimeoutError, httpx.TimeoutException):
            outcome.error, outcome.detail = "timeout", f"no end within {self._timeout_s:g} s"
        except httpx.ConnectError as error:
            outcome.error, outcome.detail = "connect", str(error)
        except httpx.HTTPError as error:
            outcome.error, outcome.detail = "disconnected", str(error) or type(error).__name__
        except _Refused as error:
            outcome.error, outcome.detail = error.kind, str(error)
        outcome.end_s = time.perf_counter()

    async def _stream(self, request: Request, model: str, sampling: Sampling, outcome: Outcome) -> None:
        url, body = self._body(request, model, sampling)
        async with self._http.stream("POST", url, content=_encoded(body)) as response:
            outcome.replica = response.headers.get(REPLICA_HEADER)
            outcome.reason = response.headers.get(REASON_HEADER)
            if response.status_code != 200:
                await response.aread()
                raise _Refused(f"http_{response.status_code}", response.text[:500])
            async for data in sse_data(response.aiter_bytes()):
                if data == "[DONE]":
                    outcome.finished = True
                    break
                _observe(data, outcome)
        if not outcome.finished:
            raise _Refused("disconnected", "the stream ended before the answer did")

    def _body(self, request: Request, model: str, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": request.max_tokens or sampling.max_tokens,
            "temperature": sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        if request.messages is not None:
            return f"{self._target.root}/v1/chat/completions", body | _chat(request)
        return f"{self._target.root}/v1/completions", body | {"prompt": _plain(request)}

    async def tokenize(self, request: Request, model: str) -> TokenIds | None:
        """The prompt as the endpoint tokenizes it, int32[n]; None if the endpoint cannot tell."""
        if (known := request.known_tokens()) is not None:
            return known
        prompt = {"prompt": request.text} if request.messages is None else _chat(request)
        body = {"model": model, **prompt}
        if request.messages is not None:
            body["add_generation_prompt"] = True
        try:
            response = await self._http.post(f"{self._target.root}/tokenize", content=_encoded(body))
            if response.status_code != 200:
                return None
            return np.array(response.json()["tokens"], np.int32)
        except (httpx.HTTPError, ValueError, KeyError, TypeError, OverflowError) as error:
            _log.warning("POST /tokenize: %r", error)
            return None


def _encoded(body: dict[str, Any]) -> bytes:
    """JSON in ASCII: a lone surrogate in a trace stays the escape it was, which UTF-8 could not carry."""
    return json.dumps(body, allow_nan=False).encode("ascii")


def _chat(request: Request) -> dict[str, Any]:
    chat: dict[str, Any] = {"messages": request.messages}
    return chat | {"tools": request.tools} if request.tools else chat


def _plain(request: Request) -> str | list[int]:
    if (known := request.known_tokens()) is not None:
        return known.tolist()
    assert request.text is not None
    return request.text


def _listed(response: httpx.Response) -> list[dict[str, Any]]:
    """The entries of an OpenAI model list that have a name."""
    try:
        data = response.json()["data"]
        return [entry for entry in data if isinstance(entry["id"], str)]
    except (ValueError, KeyError, TypeError) as error:
        raise TargetError(f"{response.url} does not answer as an OpenAI-compatible endpoint does") from error


def _explain_status(response: httpx.Response) -> str:
    status = response.status_code
    if status in (401, 403):
        return f"the API key was refused ({status}); give one with --api-key or OPENAI_API_KEY"
    if status in _NO_SUCH_ROUTE:
        return f"not there ({status}); is this the base URL of an OpenAI-compatible endpoint?"
    return f"answered {status}: {response.text[:200] or response.reason_phrase}"


async def sse_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The `data` of each server-sent event (WHATWG HTML, 9.2); an unfinished event at the end is dropped.

    Splits on CR LF and LF only: `str.splitlines`, which httpx's own line reader uses, also cuts at characters
    such as U+2028, which JSON may hold unescaped.
    """
    pending, data = b"", []
    async for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data).decode("utf-8", "replace")
                data = []


def _observe(data: str, outcome: Outcome) -> None:
    """Fold one event of the stream into the outcome."""
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise _Refused("protocol", f"an event that is not JSON: {data[:100]}") from error
    if not isinstance(chunk, dict):
        raise _Refused("protocol", f"an event that is not an object: {data[:100]}")
    if chunk.get("error"):
        raise _Refused("stream_error", json.dumps(chunk["error"])[:500])
    listed = chunk.get("choices")
    choices = [c for c in listed if isinstance(c, dict)] if isinstance(listed, list) else []
    now = time.perf_counter()
    if any(_has_content(choice) for choice in choices):
        outcome.pieces += 1
        outcome.last_s = now
        outcome.first_s = now if outcome.first_s is None else outcome.first_s
    if any(choice.get("finish_reason") for choice in choices):
        outcome.finished = True
        outcome.first_s = now if outcome.first_s is None else outcome.first_s  # an answer without any text
        outcome.last_s = now
    if isinstance(chunk.get("usage"), dict):
        _read_usage(chunk["usage"], outcome)


def _has_content(choice: dict[str, Any]) -> bool:
    """Whether a choice brings text; the opening chunk of a chat, which names the role only, does not."""
    delta = choice.get("delta")
    parts = delta if isinstance(delta, dict) else {}
    names = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
    return bool(choice.get("text")) or any(parts.get(name) for name in names)


def _read_usage(usage: dict[str, Any], outcome: Outcome) -> None:
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    outcome.prompt_tokens = _count(usage.get("prompt_tokens"))
    outcome.completion_tokens = _count(usage.get("completion_tokens"))
    outcome.cached_tokens = _count(cached)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
