"""Text to token ids and back, chat messages included.

Built by `tokenizer_build` from GGUF metadata, a Hugging Face folder or the random model; loaded by
`models.load_tokenizer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from replica.chat_template import ChatTemplate
from replica.errors import ChatTemplateError

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Vocabulary:
    """What a model file says about its tokens.

    Attributes:
        backend: the `tokenizers` object that splits and merges.
        template: Jinja source of the chat template, or None.
        token_bytes: the bytes each id stands for; special tokens as their own text.
        special_ids: control tokens, left out of decoded text.
        eos_ids: ids that end a generation.
        eos_id: the one that the chat template may write.
        bos_id, add_bos: the begin token, and whether plain text starts with it.
    """

    backend: tokenizers.Tokenizer
    template: str | None
    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int]
    eos_ids: frozenset[int]
    eos_id: int | None = None
    bos_id: int | None = None
    add_bos: bool = False


class Tokenizer:
    """Encodes and decodes; every method may be called from any thread."""

    def __init__(self, vocabulary: Vocabulary, context_length: int, model_digest: str) -> None:
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        self.context_length = context_length
        self.model_digest = model_digest
        self.eos_ids = vocabulary.eos_ids
        self.vocab_size = len(vocabulary.token_bytes)

    @property
    def bos_id(self) -> int | None:
        """The begin-of-text token, if the model has one."""
        return self._vocabulary.bos_id

    def encode_text(self, text: str, add_bos: bool | None = None) -> TokenIds:
        """int32[n]; special tokens written out in the text become ids. add_bos None: as the model says."""
        ids = self._encode(text)
        wanted = self._vocabulary.add_bos if add_bos is None else add_bos
        bos = self._vocabulary.bos_id
        if not wanted or bos is None or (len(ids) and ids[0] == bos):
            return ids
        return np.concatenate([np.array([bos], dtype=np.int32), ids])

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> TokenIds:
        """int32[n] of the rendered conversation. Raises `ChatTemplateError` for what cannot be rendered."""
        return self._encode(self.render_chat(messages, tools, add_generation_prompt, template_kwargs))

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The conversation as the text the model will see."""
        if self._template is None:
            raise ChatTemplateError("this model has no chat template: use plain completions")
        return self._template.render(messages, tools, add_generation_prompt, template_kwargs)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""
        special = self._vocabulary.special_ids if skip_special else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in special).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for; empty for an id the vocabulary does not have."""
        token_id = int(token_id)
        return self._vocabulary.token_bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token that `decode` leaves out."""
        return int(token_id) in self._vocabulary.special_ids

    def _encode(self, text: str) -> TokenIds:
        # encode_batch_fast leaves out the offsets that nobody here needs.
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.array(encoding.ids, dtype=np.int32)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        known = self._vocabulary
        if known.template is None:
            return None
        special = {"bos_token": self._text(known.bos_id), "eos_token": self._text(known.eos_id)}
        return ChatTemplate(known.template, special)

    def _text(self, token_id: int | None) -> str:
        return "" if token_id is None else self.token_bytes(token_id).decode("utf-8", "replace")
