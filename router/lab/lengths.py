"""Arrivals with lengths only, as CSV: Azure/AzurePublicDataset and BurstGPT (HPMLL/BurstGPT).

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:17:03.9799600,4808,10

    Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
    5,...

Columns are found by name. Nothing is known of what prompts share, so they share nothing: such a trace is an
arrival process to lay over others, or a negative control. Answers of no tokens, failures in BurstGPT, count
as one token.
"""

from collections.abc import Iterator
from datetime import datetime, timezone
from functools import partial

from router.lab.record import Json, Request
from router.lab.rows import OnBad, Row, TraceOptions, counted_from_first, each, refuse

_BLOCK_SIZE = 64
_PROMPTS = {"contexttokens": "generatedtokens", "request tokens": "response tokens"}


def sniff(data: Json) -> bool:
    """Whether there are columns for arrivals and lengths."""
    return "timestamp" in data and any(name in data for name in _PROMPTS)


def read(rows: Iterator[Row], options: TraceOptions, bad: OnBad = refuse) -> Iterator[Request]:
    """The requests of the file; the first one is at 0 s."""
    return counted_from_first(each(rows, partial(_request, options=options), bad))


def _request(row: Row, options: TraceOptions) -> Request:
    prompt = next((name for name in _PROMPTS if name in row.data), "contexttokens")
    length, answer = row.count(prompt, minimum=1), row.count(_PROMPTS[prompt])
    if length is None:
        raise row.error(f"no value under `{prompt}`")
    return Request(
        blocks=options.blocks((), options.block_size or _BLOCK_SIZE, length, own=row.number),
        max_tokens=None if answer is None else max(1, answer),
        timestamp_s=_seconds(row),
        session_id=row.label("session id"),
    )


def _seconds(row: Row) -> float:
    """A number of seconds, or a date with time, UTC unless it says otherwise."""
    stamp = row.data.get("timestamp")
    if not isinstance(stamp, str):
        seconds = row.decimal("timestamp")
        if seconds is None:
            raise row.error("no value under `timestamp`")
        return seconds
    moment, _, fraction = stamp.partition(".")  # Python 3.10 knows no fractions of 7 digits
    digits = fraction[: len(fraction) - len(fraction.lstrip("0123456789"))]
    try:
        parsed = datetime.fromisoformat(moment + fraction[len(digits) :].replace("Z", "+00:00"))
    except ValueError as error:
        raise row.error(f"`timestamp` is neither seconds nor a date with time: {stamp}") from error
    parsed = parsed if parsed.tzinfo else parsed.replace(tzinfo=timezone.utc)
    return parsed.timestamp() + float(f"0.{digits or 0}")
