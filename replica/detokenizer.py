"""Tokens to text as they come: never half a character, never part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class Detokenizer:
    """The text of one choice, token by token.

    Bytes wait until they make whole UTF-8 characters (what can never become one turns into U+FFFD, as in a
    decode of everything at once). Text that may be the beginning of a stop string waits until that is
    settled.

    Among stop strings, the one that is complete first ends the text, so the result does not depend on where
    tokens begin and end.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, token: int, stops: bool = True) -> str:
        """Take the next token; return the text that is now certain.

        With `stops` false no stop string is looked for (before min_tokens). Sets `stopped` when a stop string
        is complete; the text returned ends before it, and nothing must be pushed any more.
        """
        text = self._decode(self._token_bytes(token))
        if not self._stop:
            return text
        text, self._held = self._held + text, ""
        if not stops:
            return text
        return self._until_stop(text)

    def flush(self) -> str:
        """The text still held back, at the end of an answer that no stop string ended."""
        if self.stopped:
            return ""
        text, self._held = self._held + self._decode(b"", True), ""
        return text

    def _until_stop(self, text: str) -> str:
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)[1]]
        certain = len(text) - max(_overlap(text, stop) for stop in self._stop)
        self._held = text[certain:]
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with, short of the whole of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
