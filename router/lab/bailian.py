"""Alibaba Bailian traces (alibaba-edu/qwen-bailian-usagetraces-anon): chats by lengths and block hashes.

    {"chat_id": 160, "parent_chat_id": 159, "timestamp": s, "input_length": n, "output_length": m,
     "type": "text", "turn": 2, "hash_ids": [...]}

Ids stand for blocks of 16 tokens, the last one partial. A chat whose parent was seen is a later turn of its
parent's session; the others (parent -1, or before the trace began) start one.
"""

from collections.abc import Iterator

from router.lab.mooncake import answer_length, prompt
from router.lab.record import Json, Request
from router.lab.rows import OnBad, Row, TraceOptions, counted_from_first, each, refuse

_BLOCK_SIZE = 16


def sniff(data: Json) -> bool:
    """Whether the first row names its chat and that one's parent."""
    return "chat_id" in data and "parent_chat_id" in data


def read(rows: Iterator[Row], options: TraceOptions, bad: OnBad = refuse) -> Iterator[Request]:
    """The requests of the file; the first one is at 0 s."""
    sessions: dict[str, str] = {}  # chat: the first chat of its session
    block_size = options.block_size or _BLOCK_SIZE

    def request(row: Row) -> Request:
        chat, seconds = row.label("chat_id"), row.decimal("timestamp")
        if chat is None or seconds is None:
            raise row.error("no `chat_id`" if chat is None else "no `timestamp` (seconds)")
        made = Request(
            blocks=prompt(row, block_size, options),
            max_tokens=answer_length(row),
            timestamp_s=seconds,
            session_id=sessions.get(row.label("parent_chat_id") or "", chat),
        )
        sessions[chat] = made.session_id or chat
        return made

    return counted_from_first(each(rows, request, bad))
