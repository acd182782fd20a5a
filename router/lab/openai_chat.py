"""OpenAI requests, one a line: the body itself, or the lines of OpenAI's batch files with it under `body`.

    {"messages": [...], "tools"?: [...], "max_tokens"?: n, "timestamp"?: seconds, "session_id"?: "..."}
    {"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

`prompt` (a text or a list of token ids) may stand in place of `messages`. Timestamps count from any origin;
the first one of the file becomes 0. `timestamp` and `session_id` are looked for beside `body` and inside it.
"""

from collections.abc import Iterator
from dataclasses import replace

from router.lab.errors import TraceError
from router.lab.record import Request
from router.lab.rows import Line, OnBad, Row, TraceOptions, refuse


def sniff(first: Line) -> bool:
    """Whether the first line holds messages or a prompt."""
    data = first.peek()
    body = data.get("body")
    return any(
        name in part for part in (data, body) if isinstance(part, dict) for name in ("messages", "prompt")
    )


def read(lines: Iterator[Line], options: TraceOptions, bad: OnBad = refuse) -> Iterator[Request]:
    """The requests of the file; `options` has nothing to say about real text."""
    origin: float | None = None
    for line in lines:
        try:
            request = _request(line.row())
        except TraceError as error:
            bad(error)
            continue
        if request.timestamp_s is not None:
            origin = request.timestamp_s if origin is None else origin
            request = replace(request, timestamp_s=max(0.0, request.timestamp_s - origin))
        yield request


def _request(row: Row) -> Request:
    """The request as it stands, its time as the trace counts it."""
    body = row.nested("body")
    outer = row.number("timestamp")
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
        timestamp_s=body.number("timestamp") if outer is None else outer,
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
