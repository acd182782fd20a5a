"""How answers are drawn: what does not go together, and the wire's "sampling" dict of a body's fields."""

from typing import Any

from router.api.errors import ApiError, invalid
from router.api.schemas import GenerationBody

# Field: what a beam search can be asked for. It looks for the likeliest answers, so there is nothing to draw.
_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 0),
    "top_p": (None, 1),
    "top_k": (None, -1, 0),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
}
# Field: what may be given without a beam search.
_WITHOUT_BEAMS: dict[str, tuple[Any, ...]] = {"length_penalty": (None, 1), "early_stopping": (None, False)}


def width_of(body: GenerationBody) -> int:
    """Answers that are drawn for each prompt, or beams: `best_of`, or else `n`."""
    return body.best_of or body.n or 1


def check_sampling(body: GenerationBody, max_choices: int) -> None:
    """Raise `ApiError` 400 for too many choices, and for fields that contradict each other."""
    choices = body.n or 1
    for name, count in (("n", choices), ("best_of", width_of(body))):
        if count > max_choices:
            raise invalid(f"'{name}' must be at most {max_choices}.", name)
    if width_of(body) < choices:
        raise invalid(f"'best_of' must be at least 'n' ({choices}).", "best_of")
    if body.stream_options is not None and not body.stream:
        raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    if body.use_beam_search:
        _check_beams(body)
        return
    if body.stream and width_of(body) > choices:
        raise invalid("With 'stream', 'best_of' must equal 'n': the best is known at the end.", "best_of")
    for name, harmless in _WITHOUT_BEAMS.items():
        if getattr(body, name) not in harmless:
            raise invalid(f"'{name}' needs 'use_beam_search' to be true.", name)


def sampling_of(body: GenerationBody, logprobs: int | None) -> dict[str, Any]:
    """The wire's "sampling" of a checked body, without max_tokens, which depends on the prompt."""
    return {
        "n": body.n or 1,
        "temperature": 0.0 if body.use_beam_search else _or(body.temperature, 1.0),
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
        **_beyond(body),
    }


def _beyond(body: GenerationBody) -> dict[str, Any]:
    """What is only sent when asked for, as replicas of an earlier version refuse what they do not know."""
    found: dict[str, Any] = {}
    if width_of(body) > (body.n or 1):
        found["best_of"] = body.best_of
    if body.use_beam_search:
        found["use_beam_search"] = True
        found["length_penalty"] = _or(body.length_penalty, 1.0)
        found["early_stopping"] = bool(body.early_stopping)
    return found


def _check_beams(body: GenerationBody) -> None:
    if body.stream:
        raise _no_beams("stream", "false: the best beam is known at the end")
    for name, harmless in _WITH_BEAMS.items():
        if getattr(body, name) not in harmless:
            raise _no_beams(name, " or ".join(str(value) for value in harmless if value is not None))
    if width_of(body) < 2:
        raise invalid("'use_beam_search' needs two beams or more: give 'best_of' or 'n'.", "best_of")


def _no_beams(name: str, allowed: str) -> ApiError:
    return invalid(f"With 'use_beam_search', '{name}' must be {allowed}.", name)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
