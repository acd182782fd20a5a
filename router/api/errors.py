"""What a client is told when its request fails: OpenAI's error object, and one table from our errors to it.

`ApiError` is the HTTP face of an error; it joins the router's tree below `RouterError`. Messages name fields
and limits, never the prompt, a salt, a key or a traceback.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from router.errors import (
    BadRequest,
    NoReplica,
    QueueFull,
    ReplicaLost,
    RequestTimeout,
    RouterError,
    UpstreamError,
)

INVALID = "invalid_request_error"
SERVER = "server_error"
CLIENT_CLOSED = 499
"""nginx's status for a client that left before its answer; only metrics and logs see it."""


class ApiError(RouterError):
    """An HTTP status and OpenAI's `{"error": {"message", "type", "param", "code"}}`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def payload(self) -> dict[str, Any]:
        """The error object as JSON has it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def body(self) -> bytes:
        """`payload` as UTF-8 JSON."""
        return json.dumps(self.payload).encode()


class ClientGone(ApiError):
    """The client closed the connection; nobody will read the answer."""

    def __init__(self) -> None:
        super().__init__(CLIENT_CLOSED, "the client closed the connection", code="client_closed_request")


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """400: the field `param` is wrong."""
    return ApiError(400, message, param=param, code=code)


def context_exceeded(limit: int, prompt: int, wanted: int, param: str) -> ApiError:
    """400: prompt and answer do not fit into the model's context. All counts in tokens."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + wanted} "
        f"tokens ({prompt} in the {param}, {wanted} in the completion). Please reduce one of them."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def model_not_found(name: str) -> ApiError:
    """404: nobody serves a model of this name."""
    shown = name if len(name) <= 100 else name[:100] + "..."
    return ApiError(404, f"The model `{shown}` does not exist.", param="model", code="model_not_found")


def too_large(limit: int) -> ApiError:
    """413: the body is longer than `limit` bytes."""
    return ApiError(413, f"The request body is longer than {limit} bytes.", code="request_too_large")


def overloaded() -> ApiError:
    """429: too many long bodies wait to be checked."""
    message = "Too many long requests are waiting to be checked."
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=_retry(1.0))


def internal() -> ApiError:
    """500: our fault; the log has the rest."""
    return ApiError(
        500, "The server had an error while processing the request.", kind=SERVER, code="internal_error"
    )


def _retry(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def api_error(error: RouterError) -> ApiError:
    """The HTTP face of one of our errors."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadRequest):
        return invalid(error.message, error.param)
    if isinstance(error, QueueFull):
        return ApiError(
            429, str(error), kind="rate_limit_error", code="queue_full", headers=_retry(error.retry_after_s)
        )
    if isinstance(error, NoReplica):
        return _unavailable("No replica is ready to take the request.", "no_replica")
    if isinstance(error, ReplicaLost):
        return _unavailable("The replica was lost before the answer was complete.", "replica_lost")
    if isinstance(error, RequestTimeout):
        return ApiError(504, f"Timeout: {error}.", kind=SERVER, code="timeout")
    if isinstance(error, UpstreamError):
        return ApiError(500, "The replica failed on this request.", kind=SERVER, code="replica_error")
    return internal()


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, kind=SERVER, code=code, headers=_retry(1.0))
