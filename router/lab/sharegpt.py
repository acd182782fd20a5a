"""ShareGPT's conversations, as text or tokenized.

    {"id": "...", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"input_tok_ids": [...], "output_toks": n, "arrival_time_ns": ns}

The first form, usually one JSON array, has a request for each answer, whose prompt is all that was said
before it; a conversation is a session without a clock. The second form, of LLMServingSim, is a request a row.
"""

from collections.abc import Iterator

from router.lab.errors import TraceError
from router.lab.record import Json, Request, answer_tokens
from router.lab.rows import OnBad, Row, TraceOptions, counted_from_first, each, refuse

_ROLES = {
    "human": "user", "user": "user", "system": "system", "tool": "tool",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", 
    "bing": "assistant", "bard": "assistant",
}  # fmt: skip


def sniff_text(data: Json) -> bool:
    """Whether the first row is a conversation."""
    return isinstance(data.get("conversations"), list)


def sniff_tokens(data: Json) -> bool:
    """Whether the first row has token ids."""
    return "input_tok_ids" in data


def read_text(rows: Iterator[Row], options: TraceOptions, bad: OnBad = refuse) -> Iterator[Request]:
    """A request for each answer, conversation by conversation."""
    for number, row in enumerate(rows):
        try:
            yield from _conversation(row, number)
        except TraceError as error:
            bad(error)


def _conversation(row: Row, number: int) -> list[Request]:
    messages: list[Json] = []
    requests = []
    name = row.label("id") or str(number)
    for part in map(row.inner, row.data.get("conversations") or ()):
        said, role = part.text("value"), _ROLES.get(part.text("from") or "")
        if said is None or role is None:
            raise row.error("a part of `conversations` has no `value`, or no `from` that is known")
        if role == "assistant" and messages:
            answer = answer_tokens(said)
            requests.append(
                Request(messages=tuple(messages), max_tokens=answer, session_id=f"{name}#{number}")
            )
        messages.append({"role": role, "content": said})
    return requests


def read_tokens(rows: Iterator[Row], options: TraceOptions, bad: OnBad = refuse) -> Iterator[Request]:
    """The requests of the file; the first one is at 0 s."""
    return counted_from_first(each(rows, _tokenized, bad))


def _tokenized(row: Row) -> Request:
    ids, arrival = row.ids("input_tok_ids"), row.decimal("arrival_time_ns")
    if ids is None:
        raise row.error("no `input_tok_ids`")
    return Request(
        token_ids=ids,
        max_tokens=row.count("output_toks", minimum=1),
        timestamp_s=None if arrival is None else arrival / 1e9,
    )
