"""The objects of a trace file, and the checked reading of their fields.

Every complaint names the file, the line and the field.
"""

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from router.lab.blocks import VOCAB, Blocks, TokenIds
from router.lab.errors import OptionError, TraceError
from router.lab.record import Json, Request

MAX_SCALE = 1e6
GIVEN_BY = "--block-size, or --trace-block-size of simulate"
"""The options that say how many tokens an id of the trace stands for."""

OnBad = Callable[[TraceError], None]
"""What to do about a broken line: raise the error, or take note of it; then the line is left out."""


def refuse(error: TraceError) -> None:
    """The `OnBad` that lets no broken line pass."""
    raise error


@dataclass(frozen=True)
class TraceOptions:
    """How to read formats that record lengths instead of text.

    `scale` shrinks (or stretches) lengths, `block_size` is the trace's tokens per hash id (None: inferred),
    and synthesized token ids are drawn from [`vocab`[0], `vocab`[1]). Sessions that are recorded without a
    common clock start `session_gap_s` apart on average, as a Poisson process by `seed`.
    """

    scale: float = 1.0
    block_size: int | None = None
    vocab: tuple[int, int] = VOCAB
    seed: int = 0
    session_gap_s: float = 60.0

    def __post_init__(self) -> None:
        low, high = self.vocab
        if not 0 < self.scale <= MAX_SCALE:
            raise OptionError(f"the scale must be a positive number up to {MAX_SCALE:g}, not {self.scale}")
        if not (math.isfinite(self.session_gap_s) and self.session_gap_s >= 0):
            raise OptionError(f"the gap between sessions must be a time in seconds, not {self.session_gap_s}")
        if self.block_size is not None and self.block_size < 1:
            raise OptionError(f"the block size must be positive, not {self.block_size}")
        if not 0 <= low < high <= 2**31:
            raise OptionError(f"no token ids between {low} and {high}")

    def blocks(self, ids: Sequence[int], size: int, num_tokens: int, own: int) -> Blocks:
        """A prompt of hash ids; tokens that they do not cover are its own, as numbered by `own` > 0."""
        return Blocks.of(ids, size, num_tokens, own, self.vocab, self.seed)

    def runs(self, runs: Sequence[Sequence[int]], size: int, num_tokens: int, own: int) -> Blocks:
        """The same from runs of ids, [first, count]."""
        array = np.array(runs, np.int64).reshape(-1, 2)
        return Blocks.of_runs(array, size, num_tokens, own, self.vocab, self.seed)

    def session_starts(self) -> Iterator[float]:
        """When sessions without a common clock start, in seconds; the first one at 0."""
        rng, now = random.Random(f"session starts {self.seed}"), 0.0
        while True:
            yield now
            now += rng.expovariate(1 / self.session_gap_s) if self.session_gap_s else 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """A JSON object of a trace and where it is from; `number` is its (first) line, counted from 1.

    The readers of fields return None where the field is absent or null.
    """

    source: str
    number: int
    data: Json

    def error(self, what: str) -> TraceError:
        """A TraceError that points at this object's line."""
        return TraceError(self.source, self.number, what)

    def decimal(self, name: str) -> float | None:
        """A finite number that is not negative."""
        return self._field(name, _is_number, "a number that is not negative")

    def count(self, name: str, minimum: int = 0) -> int | None:
        """A whole number of tokens, at least `minimum` and below 2^31."""
        self._field(name, lambda v: not _is_int(v) or v < 2**31, "below 2^31")
        return self._field(
            name, lambda v: _is_int(v) and v >= minimum, f"a whole number of at least {minimum}"
        )

    def text(self, name: str) -> str | None:
        """A string."""
        return self._field(name, lambda v: isinstance(v, str), "a string")

    def label(self, name: str) -> str | None:
        """A string or a whole number, as a string."""
        value = self._field(name, lambda v: isinstance(v, str) or _is_int(v), "a string or a whole number")
        return None if value is None else str(value)

    def objects(self, name: str) -> tuple[Json, ...] | None:
        """A list of JSON objects, not empty."""
        value = self._field(name, _is_objects, "a list of JSON objects that is not empty")
        return None if value is None else tuple(value)

    def ids(self, name: str) -> TokenIds | None:
        """A list of token ids, not empty, as int32[n]."""
        value = self._field(name, _is_ids, "a list of token ids that is not empty")
        return None if value is None else np.array(value, np.int32)

    def hash_ids(self, name: str = "hash_ids") -> Sequence[int]:
        """A list of hash ids, empty where the field is absent."""
        wanted = "a list of whole numbers that are not negative"
        return self._field(name, _is_hash_ids, wanted) or ()

    def inner(self, data: object) -> "Row":
        """An object within this one, as a row of its own."""
        if not isinstance(data, dict):
            raise self.error(f"a JSON object is expected, not {describe(data)}")
        return Row(self.source, self.number, data)

    def nested(self, name: str) -> "Row":
        """The JSON object in field `name`, or this one where the field is absent."""
        value = self._field(name, lambda v: isinstance(v, dict), "a JSON object")
        return self if value is None else Row(self.source, self.number, value)

    def _field(self, name: str, accept: Callable[[Any], bool], wanted: str) -> Any:
        value = self.data.get(name)
        if value is not None and not accept(value):
            raise self.error(f"`{name}` must be {wanted}, not {describe(value)}")
        return value


def each(rows: Iterable[Row], make: Callable[[Row], Request], bad: OnBad) -> Iterator[Request]:
    """A request of each row; `bad` is told of those that cannot be."""
    for row in rows:
        try:
            request = make(row)
        except TraceError as error:
            bad(error)
            continue
        yield request


def counted_from_first(requests: Iterable[Request]) -> Iterator[Request]:
    """The first timestamp becomes 0, and none is before it."""
    origin: float | None = None
    for request in requests:
        if request.timestamp_s is not None:
            origin = request.timestamp_s if origin is None else origin
            request = replace(request, timestamp_s=max(0.0, request.timestamp_s - origin))
        yield request


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and math.isfinite(value) and value >= 0


def _is_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _is_ids(value: object) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(_is_int(item) and 0 <= item < 2**31 for item in value)
    )


def _is_hash_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def describe(value: object) -> str:
    """How a wrong value reads in a complaint: its JSON, cut where it gets long."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
