"""What the API needs of a tokenizer."""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


class Codec(Protocol):
    """Text to token ids and back. Thread-safe. A `ValueError` means that the input cannot be encoded."""

    vocab_size: int
    context_length: int

    def encode_text(self, text: str, add_bos: bool | None = None) -> TokenIds:
        """int32[n]; add_bos None: as the model says."""
        ...

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> TokenIds:
        """int32[n] of the conversation, rendered by the model's chat template."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one id stands for."""
        ...

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of the ids."""
        ...
