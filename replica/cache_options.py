"""How long a request asks the cache to keep what it computes: the wire's "priority" and "retention"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcore.errors import CacheError
from kvcore.retention import Retention, in_order
from replica.errors import InvalidRequest

_FIELDS = {"start", "end", "priority", "duration_s"}


def retention_of(cache: Mapping[str, Any]) -> tuple[Retention, ...]:
    """The ranges of a request's "cache" dict, by their start.

    "priority" is 0..100 for all tokens; "retention" is a list of {"start", "end" (None: to the end),
    "priority", "duration_s" (None: for ever)} for ranges of tokens of the prompt and the answer.

    Raises `InvalidRequest` for both at once, a wrong type, an unknown field, overlapping or empty ranges.
    """
    priority, ranges = cache.get("priority"), cache.get("retention")
    if priority is None and ranges is None:
        return ()
    if priority is not None and ranges is not None:
        raise InvalidRequest("cache priority and cache retention exclude each other")
    if ranges is None:
        ranges = [{"priority": priority}]
    if not isinstance(ranges, list | tuple):
        raise InvalidRequest("cache retention must be a list of ranges")
    try:
        found = [_range(part) for part in ranges]
    except CacheError as error:
        raise InvalidRequest(f"cache {error}") from error
    return ordered(found)


def ordered(ranges: Sequence[Retention]) -> tuple[Retention, ...]:
    """The ranges by their start. Raises `InvalidRequest` when two overlap."""
    try:
        return in_order(ranges)
    except CacheError as error:
        raise InvalidRequest(f"cache {error}") from error


def _range(part: Any) -> Retention:
    if not isinstance(part, Mapping) or set(part) - _FIELDS:
        raise InvalidRequest(f"a cache retention range has the fields {', '.join(sorted(_FIELDS))}")
    start, end, level = part.get("start"), part.get("end"), part.get("priority")
    duration = part.get("duration_s")
    if not isinstance(level, int):
        raise InvalidRequest(f"cache priority must be an integer, not {level!r}")
    for name, value in (("start", start), ("end", end), ("priority", level)):
        if type(value) not in (int, type(None)):
            raise InvalidRequest(f"cache {name} must be an integer, not {value!r}")
    if type(duration) not in (int, float, type(None)):
        raise InvalidRequest(f"cache duration_s must be a number of seconds, not {duration!r}")
    return Retention(start or 0, end, level, duration)
