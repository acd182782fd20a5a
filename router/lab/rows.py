"""Lines of a trace file, and the checked reading of a JSON object's fields.

Every complaint names the file, the line and the field.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from router.lab.errors import OptionError, TraceError
from router.lab.record import Json, TokenIds

OnBad = Callable[[TraceError], None]
"""What to do about a broken line: raise the error, or take note of it; then the line is left out."""


def refuse(error: TraceError) -> None:
    """The `OnBad` that lets no broken line pass."""
    raise error


@dataclass(frozen=True)
class TraceOptions:
    """How to read formats that record lengths instead of text.

    `scale` shrinks (or stretches) lengths, `block_size` is the trace's tokens per hash id (None: inferred),
    and synthesized token ids are drawn from [`vocab`[0], `vocab`[1]), which is ordinary text in common
    vocabularies.
    """

    scale: float = 1.0
    block_size: int | None = None
    vocab: tuple[int, int] = (1000, 30_000)
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = self.vocab
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise OptionError(f"the scale must be a positive number, not {self.scale}")
        if self.block_size is not None and self.block_size < 1:
            raise OptionError(f"the block size must be positive, not {self.block_size}")
        if not 0 <= low < high <= 2**31:
            raise OptionError(f"no token ids between {low} and {high}")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text and where it is from; `number` counts from 1."""

    source: str
    number: int
    text: str

    def error(self, what: str) -> TraceError:
        """A TraceError that points at this line."""
        return TraceError(self.source, self.number, what)

    def row(self) -> "Row":
        """The JSON object on this line; raises TraceError if there is none."""
        try:
            data = json.loads(self.text, parse_constant=_refuse)
        except ValueError as error:
            raise self.error(f"not valid JSON ({error})") from error
        except RecursionError:
            raise self.error("not valid JSON (nested too deeply)") from None
        if not isinstance(data, dict):
            raise self.error(f"a JSON object is expected, not {_kind(data)}")
        return Row(self, data)

    def peek(self) -> Json:
        """The JSON object on this line, or an empty one: for sniffing."""
        try:
            return self.row().data
        except TraceError:
            return {}


@dataclass(frozen=True, slots=True)
class Row:
    """A JSON object of a trace; the readers return None where the field is absent or null."""

    line: Line
    data: Json

    def error(self, what: str) -> TraceError:
        """A TraceError that points at this object's line."""
        return self.line.error(what)

    def number(self, name: str) -> float | None:
        """A finite number that is not negative."""
        return self._field(name, _is_number, "a number that is not negative")

    def count(self, name: str, minimum: int = 0) -> int | None:
        """A whole number of at least `minimum`."""
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

    def nested(self, name: str) -> "Row":
        """The JSON object in field `name`, or this one where the field is absent."""
        value = self._field(name, lambda v: isinstance(v, dict), "a JSON object")
        return self if value is None else Row(self.line, value)

    def _field(self, name: str, accept: Callable[[Any], bool], wanted: str) -> Any:
        value = self.data.get(name)
        if value is not None and not accept(value):
            raise self.error(f"`{name}` must be {wanted}, not {_kind(value)}")
        return value


def _refuse(constant: str) -> None:
    """NaN and the infinities are Python's, not JSON's; no endpoint would accept them."""
    raise ValueError(f"{constant} is not a JSON value")


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


def _kind(value: object) -> str:
    """How a wrong value reads in a complaint: its JSON, cut where it gets long."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
