"""What both completion forms make of a replica's deltas: choices put together, and token counts."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.stream import Chunk, Stream


@dataclass
class Answer:
    """One choice of one prompt; `logprobs` has one entry per token, or is None when not asked for."""

    parts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """The answer's text."""
        return "".join(self.parts)

    def add(self, delta: Chunk) -> None:
        """Append a delta."""
        self.parts.append(delta["text"])
        self.finish_reason = delta.get("finish_reason") or self.finish_reason
        if delta.get("logprobs") is not None:
            self.logprobs = [*(self.logprobs or ()), *delta["logprobs"]]


def put_together(deltas: Iterable[Chunk], choices: int) -> list[Answer]:
    """The `choices` answers to one prompt."""
    answers = [Answer() for _ in range(choices)]
    for delta in deltas:
        answers[delta["index"]].add(delta)
    return answers


@dataclass(frozen=True)
class Usage:
    """Tokens of all prompts and answers of one client request, as the replicas counted them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, streams: Iterable[Stream]) -> "Usage":
        """The sum over finished streams."""
        counts = [(s.prompt_tokens, s.completion_tokens, s.cached_tokens) for s in streams]
        return cls(*(sum(column) for column in zip(*counts, strict=True)))

    @property
    def payload(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Form(Protocol):
    """How an endpoint words its answer."""

    def opening(self) -> bytes:
        """SSE frames before any text; may be empty."""
        ...

    def delta(self, prompt: int, chunk: Chunk) -> bytes:
        """SSE frames for a delta of the prompt with this number; may be empty."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """The SSE frame with the counts."""
        ...

    def whole(self, answers: list[list[Answer]], usage: Usage) -> dict[str, Any]:
        """The JSON object of a complete answer: for each prompt, its choices."""
        ...
