"""The answers of `POST /v1/completions`: `text_completion`, whole and in chunks."""

import json
import time
from collections.abc import Mapping
from typing import Any

from router.api.answers import Answer, Usage
from router.api.sse import event, quote
from router.stream import Chunk


class CompletionForm:
    """Renders the answers to one or more prompts; one instance per request.

    Choices are numbered through: choice c of prompt p has index `p * n + c`.
    """

    def __init__(self, request_id: str, model: str, choices: int, include_usage: bool) -> None:
        self._id = f"cmpl-{request_id}"
        self._model = model
        self._choices = choices
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}
        base = json.dumps(self._base, separators=(",", ":"))
        self._prefix = f'data: {base[:-1]},"choices":[{{"index":'
        self._suffix = '}],"usage":null}\n\n' if include_usage else "}]}\n\n"

    def opening(self) -> bytes:
        """Nothing: text completions begin with their text."""
        return b""

    def delta(self, prompt: int, chunk: Chunk) -> bytes:
        """A replica's delta as one chunk."""
        text, reason, entries = chunk["text"], chunk["finish_reason"], chunk["logprobs"]
        if not text and reason is None and not entries:
            return b""
        index = prompt * self._choices + chunk["index"]
        logprobs = "null" if entries is None else json.dumps(self._logprobs(index, entries))
        return (
            f'{self._prefix}{index},"text":{quote(text)},"logprobs":{logprobs},'
            f'"finish_reason":{quote(reason)}{self._suffix}'
        ).encode()

    def usage(self, usage: Usage) -> bytes:
        """The last chunk, without choices."""
        return event({**self._base, "choices": [], "usage": usage.payload})

    def whole(self, answers: list[list[Answer]], usage: Usage) -> dict[str, Any]:
        """The `text_completion` object. Source: OpenAI's API reference."""
        flat = [answer for choices in answers for answer in choices]
        choices = [
            {
                "index": index,
                "text": answer.text,
                "logprobs": self._logprobs(index, answer.logprobs),
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(flat)
        ]
        return {**self._base, "choices": choices, "usage": usage.payload}

    @property
    def _base(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
        }

    def _logprobs(self, index: int, entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
        """The older form: parallel lists; `text_offset` counts characters of the answer's tokens."""
        if entries is None:
            return None
        offsets = []
        for entry in entries:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(entry["token"])
        return {
            "text_offset": offsets,
            "token_logprobs": [entry["logprob"] for entry in entries],
            "tokens": [entry["token"] for entry in entries],
            "top_logprobs": [_top(entry) for entry in entries],
        }


def _top(entry: Mapping[str, Any]) -> dict[str, float]:
    """The most likely tokens, and the chosen one if it is not among them."""
    return {top["token"]: top["logprob"] for top in [*entry["top"], entry]}
