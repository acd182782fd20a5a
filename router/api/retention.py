"""How long the cache keeps what a request computes: `cache_priority` and `cache_retention`."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from router.api.errors import invalid
from router.api.schemas import GenerationBody, RetentionRange


def keep_of(body: GenerationBody) -> dict[str, Any]:
    """What the wire's "cache" dict has of it; empty unless asked for, or if nothing is cached anyway.

    Raises:
        ApiError: 400 for both fields together, and for ranges that overlap.
    """
    if body.cache_priority is not None and body.cache_retention:
        raise invalid("Give either 'cache_priority' or 'cache_retention', not both.", "cache_retention")
    _check_disjoint(body.cache_retention or ())
    if body.no_cache:
        return {}
    if body.cache_priority is not None:
        return {"priority": body.cache_priority}
    if body.cache_retention:
        return {"retention": [part.model_dump() for part in body.cache_retention]}
    return {}


def _check_disjoint(ranges: Sequence[RetentionRange]) -> None:
    by_start = sorted(enumerate(ranges), key=lambda entry: entry[1].start)
    for (one, before), (other, after) in pairwise(by_start):
        if before.end is None or before.end > after.start:
            first, second = sorted((one, other))
            param = f"cache_retention[{second}]"
            raise invalid(f"'{param}' overlaps 'cache_retention[{first}]'.", param)
