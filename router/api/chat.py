"""The answers of `POST /v1/chat/completions`: `chat.completion` and its chunks."""

import json
import time
from collections.abc import Mapping
from typing import Any

from router.api.answers import Answer, Usage
from router.api.sse import event, quote
from router.stream import Chunk


class ChatForm:
    """Renders one conversation's answer; one instance per request.

    Chunks repeat all but a few bytes, so their JSON is put together around parts rendered once.
    """

    def __init__(self, request_id: str, model: str, choices: int, include_usage: bool) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._model = model
        self._choices = choices
        self._created = int(time.time())
        base = json.dumps(self._base("chat.completion.chunk"), separators=(",", ":"))
        self._prefix = f'data: {base[:-1]},"choices":[{{"index":'
        self._suffix = '}],"usage":null}\n\n' if include_usage else "}]}\n\n"

    def opening(self) -> bytes:
        """The chunks that name the role, one per choice."""
        delta = '{"role":"assistant","content":""}'
        return "".join(self._chunk(index, delta, None, None) for index in range(self._choices)).encode()

    def delta(self, prompt: int, chunk: Chunk) -> bytes:
        """A replica's delta as one chunk, and one more with the reason where a choice ends."""
        text, index, reason = chunk["text"], chunk["index"], chunk["finish_reason"]
        entries = chunk["logprobs"]
        frames = ""
        if text or entries:
            frames = self._chunk(index, f'{{"content":{quote(text)}}}', _logprobs(entries), None)
        if reason is not None:
            frames += self._chunk(index, "{}", None, reason)
        return frames.encode()

    def usage(self, usage: Usage) -> bytes:
        """The last chunk, without choices."""
        return event({**self._base("chat.completion.chunk"), "choices": [], "usage": usage.payload})

    def whole(self, answers: list[list[Answer]], usage: Usage) -> dict[str, Any]:
        """The `chat.completion` object. Source: OpenAI's API reference."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": _logprobs(answer.logprobs),
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(answers[0])
        ]
        return {**self._base("chat.completion"), "choices": choices, "usage": usage.payload}

    def _base(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, index: int, delta: str, logprobs: Mapping[str, Any] | None, reason: str | None) -> str:
        details = "null" if logprobs is None else json.dumps(logprobs)
        return (
            f'{self._prefix}{index},"delta":{delta},"logprobs":{details},'
            f'"finish_reason":{quote(reason)}{self._suffix}'
        )


def _logprobs(entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    if entries is None:
        return None
    content = [{**_token(entry), "top_logprobs": [_token(top) for top in entry["top"]]} for entry in entries]
    return {"content": content, "refusal": None}


def _token(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": entry["token"], "logprob": entry["logprob"], "bytes": entry["bytes"]}
