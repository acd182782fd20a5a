"""One request of a trace, whatever the format it was read from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt in exactly one of three forms, with what the trace says about its sending.

    `messages` is an OpenAI chat (with `tools`, if any), `text` a plain prompt, `token_ids` int32[n].
    `timestamp_s` counts from the start of the trace. The requests of one `session_id` are turns, in the
    order of the trace: a turn is never sent before the one before it has ended.
    `max_tokens` is None where the trace does not say how long the answer was.
    """

    messages: tuple[Json, ...] | None = None
    text: str | None = None
    token_ids: TokenIds | None = None
    tools: tuple[Json, ...] | None = None
    max_tokens: int | None = None
    timestamp_s: float | None = None
    session_id: str | None = None

    def __post_init__(self) -> None:
        forms = (self.messages, self.text, self.token_ids)
        assert sum(form is not None for form in forms) == 1, "a prompt has exactly one form"
