"""One request of a trace, whatever the format it was read from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from router.lab.blocks import Blocks, TokenIds

Json = Mapping[str, Any]

BYTES_PER_TOKEN = 4
"""The rule of thumb for English text and code, where a trace has text and nobody has a tokenizer."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt in exactly one of four forms, with what the trace says about its sending.

    `messages` is an OpenAI chat (with `tools`, if any), `text` a plain prompt, `token_ids` int32[n], `blocks`
    says what the prompt shares, without its tokens.
    `timestamp_s` counts from the start of the trace. The requests of one `session_id` are turns, in the
    order of the trace: a turn is never sent before the one before it has ended. With `think_s` a later turn
    starts that long after that end, whatever its `timestamp_s`; the first turn starts at its `timestamp_s`.
    `max_tokens` is None where the trace does not say how long the answer was.
    """

    messages: tuple[Json, ...] | None = None
    text: str | None = None
    token_ids: TokenIds | None = None
    blocks: Blocks | None = None
    tools: tuple[Json, ...] | None = None
    max_tokens: int | None = None
    timestamp_s: float | None = None
    session_id: str | None = None
    think_s: float | None = None

    def __post_init__(self) -> None:
        forms = (self.messages, self.text, self.token_ids, self.blocks)
        assert sum(form is not None for form in forms) == 1, "a prompt has exactly one form"

    @property
    def num_tokens(self) -> int | None:
        """The prompt's length; None for text, which only a tokenizer can count."""
        if self.blocks is not None:
            return self.blocks.num_tokens
        return None if self.token_ids is None else len(self.token_ids)

    def known_tokens(self) -> TokenIds | None:
        """Token ids int32[n], given or synthesized from blocks; None for text."""
        return self.token_ids if self.blocks is None else self.blocks.token_ids()

    def tokens(self) -> TokenIds:
        """Token ids int32[n]; of text, every four bytes as one, which share beginnings as the tokens do."""
        known = self.known_tokens()
        if known is not None:
            return known
        raw = self.rendered() or b"\0"  # an empty prompt has a token too, which begins it
        return np.frombuffer(raw + b"\0" * (-len(raw) % BYTES_PER_TOKEN), np.dtype("<i4")).astype(np.int32)

    def rendered(self) -> bytes:
        """The bytes of a prompt of text, or of a chat, about as templates render it."""
        text = self.text or ""
        if self.messages is not None:
            text = "".join(_render(part) for part in (*(self.tools or ()), *self.messages))
        return text.encode("utf-8", "surrogatepass")


def _render(part: Json) -> str:
    """A message as most chat templates would: what is said between two marks, so that beginnings compare."""
    if isinstance(part.get("content"), str) and len(part) == 2:
        return f"\x02{part.get('role')}\n{part['content']}\x03"
    return f"\x02{json.dumps(part)}\x03"


def answer_tokens(text: str) -> int:
    """About how many tokens an answer of that text was, one at least."""
    return max(1, -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN))
