"""From a checked body to `PreparedRequest`s: tokens, sampling, namespace parts."""

import json
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from router.api.codec import CodecPool, TokenIds
from router.api.config import ApiConfig
from router.api.errors import context_exceeded, invalid, model_not_found
from router.api.messages import check_messages, content_size
from router.api.schemas import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from router.dispatch import ModelInfo, PreparedRequest

Prompt = str | list[int]

_MARKUP = 100
"""About how many characters a template adds for a message or a tool; only decides where it is tokenized."""


class Preparer:
    """Checks what schemas cannot (names, lengths, vocabulary), and tokenizes."""

    def __init__(
        self, config: ApiConfig, pool: CodecPool, model_info: Callable[[], ModelInfo | None]
    ) -> None:
        self._config = config
        self._pool = pool
        self._model_info = model_info

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together: the least of what the model and the replicas say."""
        info = self._model_info()
        known = self._pool.codec.context_length
        return known if info is None else min(known, info.context_length)

    def check_model(self, name: str | None) -> str:
        """The model's name as the client knows it (absent: the first). Raises `ApiError` 404."""
        if name is not None and name not in self._config.model_names:
            raise model_not_found(name)
        return name or self._config.model_names[0]

    async def chat(self, body: ChatBody, tenant: str | None) -> PreparedRequest:
        """One conversation. Raises `ApiError` 400 or 404."""
        self.check_model(body.model)
        _check_chat(body)
        sampling = self._sampling(body, _chat_logprobs(body))
        tokens = await self._encode_chat(body)
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return self._prepared(body, tenant, tokens, sampling, limit, "messages")

    async def completion(self, body: CompletionBody, tenant: str | None) -> list[PreparedRequest]:
        """One request per prompt. Raises `ApiError` 400 or 404."""
        self.check_model(body.model)
        prompts = split_prompts(body.prompt)
        if len(prompts) * (body.n or 1) > self._config.max_choices:
            limit = self._config.max_choices
            raise invalid(f"At most {limit} answers per request (prompts times n).", "prompt")
        sampling = self._sampling(body, body.logprobs)
        encode = partial(self._encode_prompts, prompts)
        sizes = [len(prompt) for prompt in prompts if isinstance(prompt, str)]
        self._check_size(max(sizes, default=0), "prompt")
        return [
            self._prepared(body, tenant, tokens, sampling, body.max_tokens, "prompt")
            for tokens in await self._pool.run(encode, sum(sizes), "prompt")
        ]

    async def tokenize(self, body: TokenizeBody) -> TokenIds:
        """int32[n] of a prompt or a conversation."""
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("Give either 'prompt' or 'messages'.", "prompt", "missing_required_parameter")
        if body.prompt is None:
            return await self._encode_chat(body)
        add_bos = False if body.add_special_tokens is False else None
        call = partial(self._pool.codec.encode_text, body.prompt, add_bos)
        return await self._pool.run(call, len(body.prompt), "prompt")

    async def detokenize(self, body: DetokenizeBody) -> str:
        """Text of the ids, special tokens included."""
        self.check_model(body.model)
        self._check_ids(body.tokens, "tokens")
        call = partial(self._pool.codec.decode, body.tokens, False)
        return await self._pool.run(call, len(body.tokens), "tokens")

    async def _encode_chat(self, body: ChatBody | TokenizeBody) -> TokenIds:
        messages = check_messages(body.messages or [])
        size = content_size(messages) + (len(json.dumps(body.tools)) if body.tools else 0)
        if isinstance(body, ChatBody):
            self._check_size(size, "messages")
        call = partial(
            self._pool.codec.encode_chat,
            messages,
            body.tools or None,
            body.add_generation_prompt is not False,
            body.chat_template_kwargs or None,
        )
        return await self._pool.run(
            call, size + _MARKUP * (len(messages) + len(body.tools or ())), "messages"
        )

    def _encode_prompts(self, prompts: list[Prompt]) -> list[TokenIds]:
        return [self._encode_prompt(prompt) for prompt in prompts]

    def _encode_prompt(self, prompt: Prompt) -> TokenIds:
        if isinstance(prompt, str):
            return self._pool.codec.encode_text(prompt)
        self._check_ids(prompt, "prompt")
        return np.array(prompt, dtype=np.int32)

    def _check_size(self, size: int, param: str) -> None:
        """Refuse texts that cannot fit before spending seconds on tokenizing them."""
        least = self._pool.least_tokens(size)
        if least >= self.context_length:
            raise context_exceeded(self.context_length, least, 1, param)

    def _check_ids(self, ids: list[int], param: str) -> None:
        size = self._pool.codec.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            raise invalid(f"Token ids must be in 0 to {size - 1}, the model's vocabulary.", param)

    def _sampling(self, body: GenerationBody, logprobs: int | None) -> dict[str, Any]:
        """The wire's "sampling" without max_tokens, which depends on the prompt."""
        if body.n is not None and body.n > self._config.max_choices:
            raise invalid(f"'n' must be at most {self._config.max_choices}.", "n")
        if body.best_of not in (None, body.n or 1):
            raise invalid("`best_of` is not supported by this server.", "best_of", "unsupported_parameter")
        if body.stream_options is not None and not body.stream:
            raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        self._check_ids(body.stop_token_ids or [], "stop_token_ids")
        return {
            "n": body.n or 1,
            "temperature": _or(body.temperature, 1.0),
            "top_p": _or(body.top_p, 1.0),
            "top_k": max(0, body.top_k or 0),
            "min_p": _or(body.min_p, 0.0),
            "seed": body.seed,
            "stop": body.stop or [],
            "stop_token_ids": body.stop_token_ids or [],
            "presence_penalty": _or(body.presence_penalty, 0.0),
            "frequency_penalty": _or(body.frequency_penalty, 0.0),
            "repetition_penalty": _or(body.repetition_penalty, 1.0),
            "logprobs": logprobs,
            "ignore_eos": bool(body.ignore_eos),
            "min_tokens": body.min_tokens or 0,
        }

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


def split_prompts(prompt: Any) -> list[Prompt]:
    """The prompts in a completion body's `prompt`: str, list[str], list[int] or list[list[int]].

    Raises:
        ApiError: 400 for other shapes, and where a prompt is empty.
    """
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif not isinstance(prompt, list):
        raise invalid("'prompt' must be a string or a list.", "prompt", "invalid_type")
    elif all(type(item) is int for item in prompt):
        prompts = [prompt]
    else:
        prompts = prompt
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


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


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
