"""Transcripts of agents with their full text.

    {"session_id": "...", "timestamp_ms": ms, "input": "...", "output": "..."}
    {"task_id": 0, "trial": 0, "traj": [{"role": "system", "content": "..."}, ...]}

The first form (LMCache/lmcache-agent-trace) is a call a row. The second (sierra-research/tau-bench, a JSON
array) is a run a row, with all its messages: each answer of the assistant was a request, whose prompt is the
messages before it. A run is a session without a clock.
"""

from collections.abc import Iterator

from router.lab.errors import TraceError
from router.lab.record import Json, Request, answer_tokens
from router.lab.rows import OnBad, Row, TraceOptions, counted_from_first, each, refuse


def sniff_calls(data: Json) -> bool:
    """Whether the first row is a call: what went in and what came out."""
    return isinstance(data.get("input"), str) and isinstance(data.get("output"), str)


def sniff_runs(data: Json) -> bool:
    """Whether the first row is a run with its trajectory."""
    return isinstance(data.get("traj"), list)


def read_calls(rows: Iterator[Row], options: TraceOptions, bad: OnBad = refuse) -> Iterator[Request]:
    """The requests of the file; the first one is at 0 s."""
    return counted_from_first(each(rows, _call, bad))


def _call(row: Row) -> Request:
    text, answer, stamp = row.text("input"), row.text("output"), row.decimal("timestamp_ms")
    if text is None:
        raise row.error("no `input`")
    return Request(
        text=text,
        max_tokens=None if answer is None else answer_tokens(answer),
        timestamp_s=None if stamp is None else stamp / 1000,
        session_id=row.label("session_id"),
    )


def read_runs(rows: Iterator[Row], options: TraceOptions, bad: OnBad = refuse) -> Iterator[Request]:
    """A request for each answer of the assistant, run by run."""
    for number, row in enumerate(rows):
        try:
            yield from _run(row, number)
        except TraceError as error:
            bad(error)


def _run(row: Row, number: int) -> list[Request]:
    messages = row.objects("traj") or ()
    session = f"{row.label('task_id') or 'run'}-{row.label('trial') or 0}#{number}"
    requests = []
    for turn, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise row.error(f"`traj[{turn}]` has no `role`")
        if message["role"] == "assistant" and turn:
            said = f"{message.get('content') or ''}{message.get('tool_calls') or ''}"
            requests.append(
                Request(messages=messages[:turn], max_tokens=answer_tokens(said), session_id=session)
            )
    return requests
