"""What is asked of an engine, and what it answers: `Request`, `SamplingParams`, `Output`.

The wire form is a plain dict (see `Request.from_wire` and `Output.chunks`), tokens as little-endian int32 and
prefix hashes as little-endian uint64 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.retention import Retention
from replica.cache_options import ordered, retention_of
from replica.errors import InvalidRequest

WIRE_VERSION = 1
MAX_CHOICES = 128
MAX_LOGPROBS = 100
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How the answer is drawn. Raises `InvalidRequest` for values out of range.

    Attributes:
        n: choices, each sampled on its own.
        best_of: choices to draw, of which the n with the highest mean log-probability are the answer; None
            draws n. With beam search, the width.
        max_tokens: longest answer in tokens.
        temperature: below 1e-5 is greedy.
        top_p: keep the most likely tokens that together reach this probability, after top_k.
        top_k: keep this many tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one.
        seed: the same seed, prompt and parameters give the same answer, whatever else runs; None is random.
            Choice i draws from a stream of its own; choice 0 is what n = 1 gives.
        stop: strings that end the answer; they are not part of it.
        stop_token_ids: token ids that end the answer.
        presence_penalty: taken off the logits of tokens that occur in the answer.
        frequency_penalty: the same, times the number of occurrences.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or answer
            (CTRL, arXiv:1909.05858).
        logprobs: None for none, else how many alternatives to report beside each chosen token.
        ignore_eos: go on after the model's end-of-text token.
        min_tokens: no end-of-text, stop token or stop string before this many tokens.
        use_beam_search: search for the likeliest answers (see `replica.beams`) instead of drawing them.
            Temperature, top_p, top_k, min_p and seed have no effect then; penalties are refused.
        length_penalty: beams score total log-probability / length**length_penalty; above 0 favours long
            answers.
        early_stopping: True ends the search with the first best_of finished answers; False when the best
            beam, as long as it is now, does not beat the worst of them; "never" when it cannot at any length.
    """

    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        """Check every value; comparisons with NaN are false, so NaN never passes."""
        for name in _INTEGERS:
            if not isinstance(getattr(self, name), (int, type(None))):
                raise InvalidRequest(f"{name} must be an integer")
        checks = {
            f"n must be 1 to {MAX_CHOICES}": 1 <= self.n <= MAX_CHOICES,
            "max_tokens must be at least 1": self.max_tokens >= 1,
            "temperature must be a finite number, 0 or more": 0 <= self.temperature < math.inf,
            "top_p must be above 0 and at most 1": 0 < self.top_p <= 1,
            "top_k must be -1 (all), 0 (all) or more": self.top_k >= -1,
            "min_p must be 0 to 1": 0 <= self.min_p <= 1,
            "presence_penalty must be -2 to 2": -2 <= self.presence_penalty <= 2,
            "frequency_penalty must be -2 to 2": -2 <= self.frequency_penalty <= 2,
            "repetition_penalty must be a finite number above 0": 0 < self.repetition_penalty < math.inf,
            f"logprobs must be 0 to {MAX_LOGPROBS}": self.logprobs is None
            or 0 <= self.logprobs <= MAX_LOGPROBS,
            "min_tokens must be 0 to max_tokens": 0 <= self.min_tokens <= self.max_tokens,
            "stop strings must not be empty": all(self.stop),
            f"best_of must be n to {MAX_CHOICES}": self.n <= self.width <= MAX_CHOICES,
            "length_penalty must be -10 to 10": -10 <= self.length_penalty <= 10,
            "use_beam_search must be true or false": isinstance(self.use_beam_search, bool),
            'early_stopping must be true, false or "never"': isinstance(self.early_stopping, bool)
            or self.early_stopping == "never",
            "beam search takes no penalties": not (self.use_beam_search and self.penalised),
        }
        for message, fine in checks.items():
            if not fine:
                raise InvalidRequest(message)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> SamplingParams:
        """Read the "sampling" dict of a request; missing and None entries take their defaults."""
        unknown = set(wire) - _SAMPLING_FIELDS
        if unknown:
            raise InvalidRequest(f"unknown sampling parameter {sorted(unknown)[0]!r}")
        values = {name: value for name, value in wire.items() if value is not None}
        try:
            if "stop" in values:
                values["stop"] = _strings(values["stop"])
            if "stop_token_ids" in values:
                values["stop_token_ids"] = frozenset(map(int, values["stop_token_ids"]))
            return cls(**values)
        except (TypeError, ValueError) as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest(f"malformed sampling parameters: {error}") from error

    @property
    def width(self) -> int:
        """Choices that are drawn, or beams."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranked(self) -> bool:
        """Whether the choices are the best of more."""
        return self.width > self.n and not self.use_beam_search

    def ending_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Token ids that end an answer, given the model's end-of-text tokens."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | eos_ids

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """Whether any token is excluded from the draw by top_k, top_p or min_p."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalised(self) -> bool:
        """Whether any penalty changes the logits."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0


_INTEGERS = ("n", "max_tokens", "top_k", "seed", "logprobs", "min_tokens", "best_of")
_SAMPLING_FIELDS = {f.name for f in fields(SamplingParams)}


def _strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(s, str) for s in strings):
        raise InvalidRequest("stop must be a string or a list of strings")
    return strings


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and how to answer it.

    Attributes:
        id: unique among the requests in the engine.
        tokens: int32[n], the prompt, n >= 1.
        sampling: how to draw the answer.
        tenant, salt: narrow who shares cached prefixes with whom.
        adapter: name of an adapter; an engine refuses one it has not loaded.
        hashes: uint64[n // block_size] as the router computed them, or None.
        read: whether the prompt may be served from the cache.
        publish: whether what is computed may be cached.
        retention: how long to keep which tokens in the cache; ranges must not overlap.
    """

    id: str
    tokens: npt.NDArray[np.int32]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: str | None = None
    salt: str | int | None = field(default=None, repr=False)
    adapter: str | None = None
    hashes: npt.NDArray[np.uint64] | None = None
    read: bool = True
    publish: bool = True
    retention: tuple[Retention, ...] = ()

    def __post_init__(self) -> None:
        """Raise `InvalidRequest` for ranges that overlap, which the cache would refuse amid a step."""
        ordered(self.retention)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Request:
        """Read the dict a router sends. Raises `InvalidRequest` when it is malformed."""
        if wire.get("v") != WIRE_VERSION:
            raise InvalidRequest(f"request version {wire.get('v')!r}, this replica speaks {WIRE_VERSION}")
        try:
            namespace, cache = wire.get("namespace") or {}, wire.get("cache") or {}
            hashes = wire.get("hashes")
            return cls(
                id=str(wire["id"]),
                tokens=tokens_from_wire(wire["tokens"]),
                sampling=SamplingParams.from_wire(wire.get("sampling") or {}),
                tenant=namespace.get("tenant"),
                salt=namespace.get("salt"),
                adapter=namespace.get("adapter"),
                hashes=None
                if hashes is None
                else np.frombuffer(hashes, dtype="<u8").astype(np.uint64, copy=False),
                read=bool(cache.get("read", True)),
                publish=bool(cache.get("publish", True)),
                retention=retention_of(cache),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest(f"malformed request: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Start:
    """Facts known once the first token is there; `seq` is the cache's once the prompt was committed."""

    prompt_tokens: int
    cached_tokens: int
    epoch: int
    seq: int


@dataclass(frozen=True)
class Usage:
    """Tokens of a finished request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Failure:
    """Why a request ended without an answer; `code` is "internal" or "unavailable"."""

    code: str
    message: str


@dataclass(frozen=True)
class Output:
    """What one step adds to one choice of one request; without tokens, just that the answer has begun.

    Attributes:
        request_id: whose.
        index: which choice.
        text: new text; may be empty while bytes of a character or of a stop string are held back.
        tokens: new token ids, the end-of-text or stop token included.
        logprobs: one entry per token, or None when not asked for.
        finish_reason: "stop" or "length" with the last token of the choice.
        start: with the request's first token.
        usage: with the last token of its last choice.
        failure: the request is over, and no more output follows.
    """

    request_id: str
    index: int = 0
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[dict[str, Any], ...] | None = None
    finish_reason: str | None = None
    start: Start | None = None
    usage: Usage | None = None
    failure: Failure | None = None

    @property
    def last(self) -> bool:
        """Nothing follows for this request."""
        return self.usage is not None or self.failure is not None

    def chunks(self, replica_id: str) -> list[dict[str, Any]]:
        """The wire form: start, delta, end or error chunks, in order."""
        if self.failure is not None:
            return [error_chunk(self.failure.code, self.failure.message)]
        found: list[dict[str, Any]] = []
        if self.start is not None:
            found.append({"type": "start", "replica": replica_id, **vars(self.start)})
        if self.tokens:
            delta = {"type": "delta", "index": self.index, "text": self.text, "tokens": list(self.tokens)}
            delta["logprobs"] = None if self.logprobs is None else list(self.logprobs)
            delta["finish_reason"] = self.finish_reason
            found.append(delta)
        if self.usage is not None:
            found.append({"type": "end", **vars(self.usage)})
        return found


def tokens_from_wire(data: bytes) -> npt.NDArray[np.int32]:
    """int32[n] from little-endian bytes. Raises `InvalidRequest` for half a token."""
    try:
        return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)
    except ValueError as error:
        raise InvalidRequest(f"malformed tokens: {error}") from error


def error_chunk(code: str, message: str) -> dict[str, Any]:
    """The chunk that ends a request without an answer."""
    return {"type": "error", "code": code, "message": message}
