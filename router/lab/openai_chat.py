"""OpenAI requests, one a line: the body itself, or the lines of OpenAI's batch files with it under `body`.

    {"messages": [...], "tools"?: [...], "max_tokens"?: n, "timestamp"?: seconds, "session_id"?: "..."}
    {"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

`prompt` (a text or a list of token ids) may stand in place of `messages`. Timestamps count from any origin;
the first one of the file becomes 0. `timestamp` and `session_id` are looked for beside `body` and inside it.
"""

from collections.abc import Iterator

from router.lab.record import Json, Request
from router.lab.rows import OnBad, Row, TraceOptions, counted_from_first, each, refuse


def sniff(data: Json) -> bool:
    """Whether the first row holds messages or a prompt."""
    body = data.get("body")
    return any(
        name in part for part in (data, body) if isinstance(part, dict) for name in ("messages", "prompt")
    )


def read(rows: Iterator[Row], options: TraceOptions, bad: OnBad = refuse) -> Iterator[Request]:
    """The requests of the file; `options` has nothing to say about real text."""
    return counted_from_first(each(rows, _request, bad))


def _request(row: Row) -> Request:
    """The request as it stands, its time as the trace counts it."""
    body = row.nested("body")
    outer = row.decimal("timestamp")
    messages = body.objects("messages")
    text = token_ids = None
    if messages is not None:
        _check_roles(body, messages)
    elif isinstance(body.data.get("prompt"), list):
        token_ids = body.ids("prompt")
    else:
        text = body.text("prompt")
    if messages is None and token_ids is None and text is None:
        raise row.error("no `messages` and no `prompt`")
    return Request(
        messages=messages,
        text=text,
        token_ids=token_ids,
        tools=body.objects("tools"),
        max_tokens=_max_tokens(body),
        timestamp_s=body.decimal("timestamp") if outer is None else outer,
        session_id=row.label("session_id") or body.label("session_id"),
    )


def _max_tokens(body: Row) -> int | None:
    """OpenAI renamed the field for chats; the new name wins."""
    renamed = body.count("max_completion_tokens", minimum=1)
    return body.count("max_tokens", minimum=1) if renamed is None else renamed


def _check_roles(body: Row, messages: tuple) -> None:
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise body.error(f"`messages[{number}]` has no `role`")
