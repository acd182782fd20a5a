"""Settings of the HTTP API."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ApiConfig:
    """What the API serves, to whom, and up to which sizes.

    Attributes:
        model_names: ids that clients may send; the first is the one answers carry in `GET /v1/models`.
        api_keys: SHA-256 (lower-case hex) of each API key, and its tenant's name. Empty: open on loopback.
        admin_key: SHA-256 (lower-case hex) of the key for `/admin/...`. None: those routes answer 404.
        max_body_bytes: longest request body.
        body_timeout_s: seconds a client may take to send its body.
        max_choices: most answers to one request: prompts times `n`, or `best_of` if that is more.
        prompt_window: prompts of one request that are in flight at a time.
        default_max_tokens: answer length when the client names none; None: what remains of the context.
        inline_bytes: bodies up to this length are checked and tokenized on the event loop.
        body_threads: threads for the longer ones.
        max_pending_bodies: longer ones waiting for a thread, or in one, before clients hear 429.
        send_request_id: whether answers carry `x-request-id`; False where the server around adds it.
        stall_timeout_s: seconds beyond the request's own time until a client that reads nothing is given up.
    """

    model_names: tuple[str, ...]
    api_keys: Mapping[str, str] = field(default_factory=dict)
    admin_key: str | None = None
    max_body_bytes: int = 2 << 20
    body_timeout_s: float = 60.0
    max_choices: int = 128
    prompt_window: int = 16
    default_max_tokens: int | None = None
    inline_bytes: int = 2048
    body_threads: int = 2
    max_pending_bodies: int = 256
    send_request_id: bool = True
    stall_timeout_s: float = 5.0
