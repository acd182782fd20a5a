"""The bodies clients send, as strict pydantic models. Unknown fields are ignored, wrong types are errors.

Explicit nulls count as absent, as in OpenAI's API. Fields that would change the answer in a way this server
does not offer are refused by name (`_REFUSED`) rather than ignored. Lists without a bound are `fail_fast`:
collecting the errors of a long one would take seconds, and only the first is told.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from router.api.body import parse_object
from router.api.errors import ApiError, invalid

M = TypeVar("M", bound=BaseModel)

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 128
MAX_SALT_CHARS = 256
MAX_PRIORITY = 100
MAX_RANGES = 64
MAX_REPLICAS = 4096
_INT64 = 2**63

# Field: the values that ask for nothing special.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "logit_bias": (None, {}),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "echo": (None, False),
    "suffix": (None, ""),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
    "prompt_logprobs": (None,),
}


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class _StrictBody(_Body):
    """Where a field nobody knows is more likely a slip than one of another server's."""

    model_config = ConfigDict(extra="forbid")


Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)]


class RetentionRange(_StrictBody):
    """How long the cache keeps tokens start <= i < end of the prompt (None: and of the answer)."""

    start: int = Field(ge=0, lt=_INT64)
    end: int | None = Field(None, ge=0, lt=_INT64)
    priority: int = Field(ge=0, le=MAX_PRIORITY)
    duration_s: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _some_tokens(self) -> "RetentionRange":
        if self.end is not None and self.end <= self.start:
            raise ValueError("'end' must be more than 'start'")
        return self


class StreamOptions(_Body):
    """`stream_options`."""

    include_usage: bool | None = None


class GenerationBody(_Body):
    """What both completion endpoints take."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    best_of: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1, lt=_INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stop: list[str] | None = Field(None, max_length=MAX_STOP_STRINGS)
    user: str | None = None
    # Beyond OpenAI's
    top_k: int | None = Field(None, ge=-1, lt=_INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, lt=_INT64)
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_IDS)
    use_beam_search: bool | None = None
    length_penalty: float | None = Field(None, ge=-10, le=10)
    early_stopping: bool | None = None
    cache_salt: Salt | None = None
    no_cache: bool | None = None
    cache_priority: int | None = Field(None, ge=0, le=MAX_PRIORITY)
    cache_retention: list[RetentionRange] | None = Field(None, max_length=MAX_RANGES, fail_fast=True)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _stop_lengths(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and not all(1 <= len(text) <= MAX_STOP_CHARS for text in value):
            raise ValueError(f"each stop string must have 1 to {MAX_STOP_CHARS} characters")
        return value


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`. Messages are checked by `router.api.messages`."""

    messages: list[Any]
    max_completion_tokens: int | None = Field(None, ge=1, lt=_INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[dict[str, Any]] | None = Field(None, fail_fast=True)
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(GenerationBody):
    """`POST /v1/completions`. The prompt's shapes are told apart by `router.api.prepare`."""

    prompt: Any
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


class TokenizeBody(_Body):
    """`POST /tokenize`: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[dict[str, Any]] | None = Field(None, fail_fast=True)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(_Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)


class NamespaceBody(_StrictBody):
    """Whose cached prefixes: exactly this tenant's under exactly this salt; null is none of either."""

    tenant: str | None = None
    salt: Salt | None = None

    @model_validator(mode="after")
    def _something(self) -> "NamespaceBody":
        if not self.model_fields_set:
            raise ValueError("name a 'tenant', a 'salt' or both; null means none")
        return self


class ClearBody(_StrictBody):
    """`POST /admin/cache/clear`: either `all` or `namespace`."""

    all: bool | None = None
    namespace: NamespaceBody | None = None
    replicas: list[str] | None = Field(None, min_length=1, max_length=MAX_REPLICAS, fail_fast=True)


class ExplainBody(_StrictBody):
    """`/admin/cache/explain`: one of `prompt`, `tokens` and `messages`, and how to render the latter."""

    model: str | None = None
    prompt: str | None = None
    tokens: list[int] | None = Field(None, fail_fast=True)
    messages: list[Any] | None = None
    tools: list[dict[str, Any]] | None = Field(None, fail_fast=True)
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tenant: str | None = None
    salt: Salt | None = None
    replica: str | None = None


def parse(model: type[M], raw: bytes) -> M:
    """A body as a `model`. Raises `ApiError` 400 that names the first wrong field."""
    body = parse_object(raw)
    if issubclass(model, GenerationBody):
        _refuse_unsupported(body)
    return validated(model, body)


def validated(model: type[M], body: Mapping[str, Any]) -> M:
    """Fields as a `model`. Raises `ApiError` 400 that names the first wrong one."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _from_pydantic(error) from None


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name, harmless in _REFUSED.items():
        if name in body and body[name] not in harmless:
            raise invalid(f"`{name}` is not supported by this server.", name, "unsupported_parameter")


def _from_pydantic(error: ValidationError) -> ApiError:
    # The input is left out: error messages must not quote prompts or salts.
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    unknown = first["type"] == "extra_forbidden"
    param = ""
    # The name of an unknown field is input, too.
    for part in first["loc"][:-1] if unknown else first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    if unknown:
        where = f"'{param}'" if param else "the request"
        return invalid(f"There is an unknown field in {where}.", param or None, "unknown_parameter")
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "missing":
        return invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return invalid(f"Invalid '{param}': {message}.", param, code)
