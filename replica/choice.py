"""The text of one choice as it grows, and why it ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from replica.detokenizer import Detokenizer
from replica.request import SamplingParams
from replica.sampler import TokenLogprobs


class EngineTokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    eos_ids: frozenset[int]

    def token_bytes(self, token_id: int, /) -> bytes:
        """The bytes a token stands for; special tokens as their own text."""

    def is_special(self, token_id: int, /) -> bool:
        """Whether it is a control token, which is left out of text."""


class Choice:
    """Takes the tokens of one choice. `longest` is the most it may have, whatever max_tokens says."""

    def __init__(self, params: SamplingParams, tokenizer: EngineTokenizer, longest: int) -> None:
        self._params = params
        self._tokenizer = tokenizer
        self._longest = min(params.max_tokens, longest)
        self._ending = params.ending_ids(tokenizer.eos_ids)
        self._text = Detokenizer(self._visible_bytes, params.stop)
        self._count = 0

    def push(self, token: int) -> tuple[str, str | None]:
        """Take the next token: new text, and why the choice ends here ("stop", "length") or None."""
        text, reason = self._push(token)
        return (text if reason is None else text + self._text.flush()), reason

    def push_all(self, tokens: Iterable[int]) -> tuple[str, str | None]:
        """Take several tokens, of which only the last may end the choice."""
        texts, reason = [], None
        for token in tokens:
            text, reason = self.push(token)
            texts.append(text)
        return "".join(texts), reason

    def _push(self, token: int) -> tuple[str, str | None]:
        self._count += 1
        if token in self._ending:  # never before min_tokens: the sampler does not draw it then
            return "", "stop"
        text = self._text.push(token, self._count >= self._params.min_tokens)
        if self._text.stopped:
            return text, "stop"
        return text, "length" if self._count >= self._longest else None

    def _visible_bytes(self, token: int) -> bytes:
        return b"" if self._tokenizer.is_special(token) else self._tokenizer.token_bytes(token)


def logprob_entry(
    tokenizer: EngineTokenizer, token: int, logprobs: TokenLogprobs, top: int
) -> dict[str, Any]:
    """The wire's entry for one token, with its `top` most likely rivals."""
    rivals = [_named(tokenizer, other, value) for other, value in logprobs.top[:top]]
    return {**_named(tokenizer, token, logprobs.chosen), "top": rivals}


def _named(tokenizer: EngineTokenizer, token: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.token_bytes(token)
    text = piece.decode("utf-8", "replace")
    return {"token": text, "bytes": list(piece), "logprob": logprob, "id": token}
