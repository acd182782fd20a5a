"""From a body to `PreparedRequest`s: tokens, sampling, namespace parts.

All of this is computing, which takes seconds for the longest bodies; it knows of no event loop, and
`router.api.pool` decides where it runs. Thread-safe.
"""

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from router.api.codec import Codec, TokenIds
from router.api.config import ApiConfig
from router.api.errors import context_exceeded, invalid, model_not_found
from router.api.messages import check_messages, content_size
from router.api.retention import keep_of
from router.api.sampling import check_sampling, sampling_of, width_of
from router.api.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ExplainBody,
    GenerationBody,
    TokenizeBody,
)
from router.dispatch import ModelInfo, PreparedRequest

Prompt = str | list[int]


class Preparer:
    """Checks what schemas cannot (names, lengths, vocabulary), and tokenizes."""

    def __init__(self, config: ApiConfig, codec: Codec, model_info: Callable[[], ModelInfo | None]) -> None:
        self._config = config
        self._codec = codec
        self._model_info = model_info
        self._longest = max((len(codec.token_bytes(k)) for k in range(codec.vocab_size)), default=1)

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together: the least of what the model and the replicas say."""
        info = self._model_info()
        known = self._codec.context_length
        return known if info is None else min(known, info.context_length)

    def check_model(self, name: str | None) -> str:
        """The model's name as the client knows it (absent: the first). Raises `ApiError` 404."""
        if name is not None and name not in self._config.model_names:
            raise model_not_found(name)
        return name or self._config.model_names[0]

    def chat(self, body: ChatBody, tenant: str | None) -> PreparedRequest:
        """One conversation. Raises `ApiError` 400 or 404."""
        self.check_model(body.model)
        _check_chat(body)
        sampling = self._sampling(body, _chat_logprobs(body))
        tokens = self._encode_chat(body)
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return self._prepared(body, tenant, tokens, sampling, limit, "messages")

    def completion(self, body: CompletionBody, tenant: str | None) -> list[PreparedRequest]:
        """One request per prompt. Raises `ApiError` 400 or 404."""
        self.check_model(body.model)
        sampling = self._sampling(body, body.logprobs)
        return [
            self._prepared(body, tenant, self._encode_prompt(prompt), sampling, body.max_tokens, "prompt")
            for prompt in split_prompts(body.prompt, width_of(body), self._config.max_choices)
        ]

    def tokenize(self, body: TokenizeBody) -> TokenIds:
        """int32[n] of a prompt or a conversation. Raises `ApiError` 400 or 404."""
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("Give either 'prompt' or 'messages'.", "prompt", "missing_required_parameter")
        if body.prompt is None:
            return self._encode_chat(body)
        return self._encode_text(body.prompt, False if body.add_special_tokens is False else None)

    def detokenize(self, body: DetokenizeBody) -> str:
        """Text of the ids, special tokens included. Raises `ApiError` 400 or 404."""
        self.check_model(body.model)
        if len(body.tokens) > self.context_length:
            raise invalid(f"'tokens' may have at most {self.context_length} items.", "tokens")
        self._check_ids(body.tokens, "tokens")
        with _refusals("tokens"):
            return self._codec.decode(body.tokens, False)

    def explained(self, body: ExplainBody) -> TokenIds:
        """int32[n] of the prompt to explain, as a completion of it has them. Raises `ApiError` 400 or 404."""
        self.check_model(body.model)
        given = [name for name in ("prompt", "tokens", "messages") if getattr(body, name) is not None]
        if len(given) != 1:
            raise invalid(
                "Give one of 'prompt', 'tokens' and 'messages'.", "prompt", "missing_required_parameter"
            )
        param = given[0]
        if body.messages is not None:
            tokens = self._encode_chat(body)
        else:
            tokens = self._encode_prompt(body.prompt or body.tokens or [], param)
        if len(tokens) == 0:
            raise invalid(f"'{param}' has no tokens.", param, "empty_prompt")
        self._check_fit(len(tokens), param)
        return tokens

    def _encode_chat(self, body: ChatBody | TokenizeBody | ExplainBody) -> TokenIds:
        messages = check_messages(body.messages or [])
        tools = json.dumps(body.tools, separators=(",", ":"), ensure_ascii=False) if body.tools else ""
        self._check_fit((content_size(messages) + len(tools)) // self._longest, "messages")
        with _refusals("messages"):
            return self._codec.encode_chat(
                messages,
                body.tools or None,
                body.add_generation_prompt is not False,
                body.chat_template_kwargs or None,
            )

    def _encode_prompt(self, prompt: Prompt, param: str = "prompt") -> TokenIds:
        if isinstance(prompt, str):
            return self._encode_text(prompt)
        self._check_fit(len(prompt), param)
        self._check_ids(prompt, param)
        return np.array(prompt, dtype=np.int32)

    def _encode_text(self, text: str, add_bos: bool | None = None) -> TokenIds:
        self._check_fit(len(text) // self._longest, "prompt")
        with _refusals("prompt"):
            return self._codec.encode_text(text, add_bos)

    def _check_fit(self, least: int, param: str) -> None:
        """Refuse what has at least `least` tokens, too many, before spending seconds on it."""
        if least >= self.context_length:
            raise context_exceeded(self.context_length, least, 1, param)

    def _check_ids(self, ids: list[int], param: str) -> None:
        size = self._codec.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            raise invalid(f"Token ids must be in 0 to {size - 1}, the model's vocabulary.", param)

    def _sampling(self, body: GenerationBody, logprobs: int | None) -> dict[str, Any]:
        """The wire's "sampling" without max_tokens, which depends on the prompt."""
        check_sampling(body, self._config.max_choices)
        self._check_ids(body.stop_token_ids or [], "stop_token_ids")
        return sampling_of(body, logprobs)

    def _prepared(
        self,
        body: GenerationBody,
        tenant: str | None,
        tokens: TokenIds,
        sampling: dict[str, Any],
        wanted: int | None,
        param: str,
    ) -> PreparedRequest:
        if len(tokens) == 0:
            raise invalid(f"'{param}' has no tokens.", param, "empty_prompt")
        return PreparedRequest(
            id=uuid.uuid4().hex,
            tokens=tokens,
            sampling={**sampling, "max_tokens": self._max_tokens(body, len(tokens), wanted, param)},
            tenant=tenant,
            salt=body.cache_salt,
            use_cache=not body.no_cache,
            keep=keep_of(body),
        )

    def _max_tokens(self, body: GenerationBody, prompt: int, wanted: int | None, param: str) -> int:
        context = self.context_length
        remaining = context - prompt
        if remaining < (wanted or 1):
            raise context_exceeded(context, prompt, wanted or 1, param)
        if wanted is None:
            wanted = min(remaining, self._config.default_max_tokens or remaining)
        if (body.min_tokens or 0) > wanted:
            raise invalid(f"'min_tokens' is more than the answer may have ({wanted}).", "min_tokens")
        return wanted


def split_prompts(prompt: Any, choices: int, most: int) -> list[Prompt]:
    """The prompts in a completion body's `prompt`: str, list[str], list[int] or list[list[int]].

    Raises:
        ApiError: 400 for other shapes, where a prompt is empty, and where `choices` answers to each would be
            more than `most`.
    """
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif not isinstance(prompt, list):
        raise invalid("'prompt' must be a string or a list.", "prompt", "invalid_type")
    elif all(type(item) is int for item in prompt):
        prompts = [prompt]
    else:
        prompts = prompt
    if len(prompts) * choices > most:
        raise invalid(f"At most {most} answers per request (prompts times n or best_of).", "prompt")
    of_text = isinstance(prompts[0], str)
    if not all(isinstance(item, str) if of_text else _is_ids(item) for item in prompts):
        raise invalid(
            "'prompt' must be a string, a list of strings, a list of token ids or a list of such lists.",
            "prompt",
            "invalid_type",
        )
    if not all(prompts):
        raise invalid("'prompt' must not be empty.", "prompt", "empty_prompt")
    return prompts


def _is_ids(item: Any) -> bool:
    return isinstance(item, list) and all(type(token) is int for token in item)


@contextlib.contextmanager
def _refusals(param: str) -> Iterator[None]:
    """What the codec cannot encode or decode is the client's mistake."""
    try:
        yield
    except ValueError as error:
        raise invalid(str(error), param) from error


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs is not None:
        raise invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    return None


def _check_chat(body: ChatBody) -> None:
    if body.tool_choice not in (None, "none", "auto"):
        raise invalid(
            "Only tool_choice 'none' and 'auto' are supported.", "tool_choice", "unsupported_parameter"
        )
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise invalid(
            "Only response_format {'type': 'text'} is supported.", "response_format", "unsupported_parameter"
        )
