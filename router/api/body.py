"""Reading a request's body: bounded, strict JSON, no lone surrogates, no deep nesting, no flood of lists."""

import json
import re
from typing import Any, NoReturn

import anyio
from starlette.requests import ClientDisconnect, Request

from router.api.errors import ApiError, ClientGone, invalid, too_large

MAX_DEPTH = 64
"""Nesting of arrays and objects; templates and serializers recurse over them."""

MAX_CONTAINERS = 1 << 16
"""Arrays and objects in one body: far beyond what a conversation has. Each costs the interpreter about a
microsecond, the garbage collector's part included, in which no other thread runs."""

# In JSON text a surrogate comes as an escape; valid pairs match too, so a match only means a closer look.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The whole body. Any content type will do, since clients mislabel bodies.

    Raises:
        ApiError: 413 over `limit` bytes, 408 when it takes longer than `timeout_s` seconds, 415 when it is
            compressed.
        ClientGone: the client left meanwhile.
    """
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "Compressed request bodies are not supported.", code="unsupported_encoding")
    body: bytes | None = None
    with anyio.move_on_after(timeout_s):
        body = await _read(request, limit)
    if body is None:
        raise ApiError(408, "The request body took too long.", code="request_timeout")
    return body


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_large(limit)
            parts.append(part)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises `ApiError` 400."""
    value = parse_json(body)
    if not isinstance(value, dict):
        raise _malformed("the body must be a JSON object")
    return value


def parse_json(body: bytes) -> Any:
    """Any JSON value out of UTF-8 text. Raises `ApiError` 400."""
    if count_containers(body) > MAX_CONTAINERS:
        raise invalid(
            f"The JSON body has more than {MAX_CONTAINERS} arrays and objects.", code="invalid_json"
        )
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError:
        raise _malformed("it is not UTF-8") from None
    except ValueError as error:
        raise _malformed(str(error)) from None
    # A text with few brackets cannot be deep; the walk is only for the others.
    if text.count("[") + text.count("{") > MAX_DEPTH:
        check_depth(value)
    if _SURROGATE.search(text):
        _check_surrogates(value)
    return value


def count_containers(body: bytes) -> int:
    """How many arrays and objects a JSON text has, or (if that is few) at most has."""
    if body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS:
        return body.count(b"[") + body.count(b"{")
    # Brackets inside strings do not count: every other part between bare quotes is a string.
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = b"".join(unescaped.split(b'"')[::2])
    return outside.count(b"[") + outside.count(b"{")


def check_depth(value: Any) -> None:
    """Raise `ApiError` 400 if arrays and objects nest deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise _too_deep()


def _children(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, dict | list)]


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "The text contains a lone surrogate, which is not Unicode."
        raise invalid(message, code="invalid_unicode") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _malformed(detail: str) -> ApiError:
    return invalid(f"We could not parse the JSON body of your request: {detail}.", code="invalid_json")


def _too_deep() -> ApiError:
    return invalid(f"The JSON body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")
