"""Mooncake traces: lengths and block hashes instead of text (FAST'25 release of kvcache-ai/Mooncake).

    {"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [...], "session_id"?: "..."}

Hash id i stands for one block of the prompt; equal prefixes have equal ids. Each id is turned into tokens by
a fixed function of (seed, id, position), so prompts share exactly the blocks the trace says they share, in
every run and on every machine. Tokens that no id covers (traces that count full blocks only) are drawn
per request, so they are shared with nothing.

Some rows carry `text_input` or `messages` in place of `input_length`; those are sent as they are.
Timestamps come in ticks (3 s in the released traces); requests stamped alike are spread evenly over the time
to the next stamp, at most 3 s, because all at once is an artefact of the recording.
"""

from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from router.lab.errors import TraceError
from router.lab.record import Request, TokenIds
from router.lab.rows import Line, OnBad, Row, TraceOptions, refuse

_MARKS = ("hash_ids", "input_length", "text_input")
_USUAL_BLOCKS = (512, 16, 64, 32, 128, 256, 1024)
_SAMPLE_ROWS = 64
_MAX_TICK_S = 3.0


def sniff(first: Line) -> bool:
    """Whether the first line is stamped and has one of the fields that only this format has."""
    data = first.peek()
    return "timestamp" in data and any(mark in data for mark in _MARKS)


def read(lines: Iterator[Line], options: TraceOptions, bad: OnBad = refuse) -> Iterator[Request]:
    """The requests of the file, with lengths scaled and ticks spread."""
    rows = _rows(lines, bad)
    head = list(islice(rows, _SAMPLE_ROWS))
    block_size = options.block_size or _infer_block_size(head)
    origin: float | None = None
    for tick, length_s in _ticks(chain(head, rows)):
        origin = _milliseconds(tick[0]) if origin is None else origin
        for number, row in enumerate(tick):
            start = max(0.0, _milliseconds(row) - origin) / 1000
            try:
                request = _request(row, start + length_s * number / len(tick), block_size, options)
            except TraceError as error:
                bad(error)
                continue
            yield request


def _rows(lines: Iterator[Line], bad: OnBad) -> Iterator[Row]:
    """The rows whose time and ids can be read."""
    for line in lines:
        try:
            row = line.row()
            _milliseconds(row), _hash_ids(row)
        except TraceError as error:
            bad(error)
            continue
        yield row


def _milliseconds(row: Row) -> float:
    stamp = row.number("timestamp")
    if stamp is None:
        raise row.error("no `timestamp` (milliseconds)")
    return stamp


def _ticks(rows: Iterator[Row]) -> Iterator[tuple[list[Row], float]]:
    """Runs of rows stamped alike, each with the seconds it may be spread over."""
    tick: list[Row] = []
    length_s = 0.0
    for row in rows:
        if tick and _milliseconds(row) != _milliseconds(tick[0]):
            length_s = min(_MAX_TICK_S, max(0.0, _milliseconds(row) - _milliseconds(tick[0])) / 1000)
            yield tick, length_s
            tick = []
        tick.append(row)
    if tick:
        yield tick, length_s  # nothing follows: as long as the tick before


def _infer_block_size(rows: list[Row]) -> int:
    """The usual size that explains most rows, whose ids count floor or ceil(input_length / size)."""
    lengths = [(row.count("input_length"), len(_hash_ids(row))) for row in rows if row.data.get("hash_ids")]
    fits = {size: sum(_fits(length, ids, size) for length, ids in lengths) for size in _USUAL_BLOCKS}
    best = max(_USUAL_BLOCKS, key=lambda size: fits[size])
    if lengths and not fits[best]:
        raise rows[0].error("input_length and hash_ids fit no usual block size; give it with --block-size")
    return best


def _fits(length: int | None, ids: int, block_size: int) -> bool:
    return length is None or ids in (length // block_size, -(-length // block_size))


def _hash_ids(row: Row) -> NDArray[np.int64]:
    value = row.data.get("hash_ids")
    ids = [] if value is None else value
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**63 for i in ids):
        raise row.error("`hash_ids` must be a list of whole numbers that are not negative")
    return np.array(ids, np.int64)


def _request(row: Row, timestamp_s: float, block_size: int, options: TraceOptions) -> Request:
    messages, text = row.objects("messages"), row.text("text_input")
    synthesize = messages is None and text is None
    output_length = row.count("output_length")
    return Request(
        messages=messages,
        text=text if messages is None else None,
        token_ids=_prompt(row, block_size, options) if synthesize else None,
        max_tokens=None if output_length is None else max(1, round(output_length * options.scale)),
        timestamp_s=timestamp_s,
        session_id=row.label("session_id"),
    )


def _prompt(row: Row, block_size: int, options: TraceOptions) -> TokenIds:
    """Token ids int32[n] of the row: its blocks, scaled, then what no block covers."""
    length, ids = row.count("input_length", minimum=1), _hash_ids(row)
    if length is None:
        raise row.error("no `input_length`, `text_input` or `messages`")
    if not _fits(length, len(ids), block_size):
        raise row.error(
            f"{len(ids)} hash_ids do not fit input_length {length} by blocks of {block_size} (--block-size)"
        )
    scaled_block = max(1, round(block_size * options.scale))
    scaled = max(1, round(length * scaled_block / block_size))
    blocks = synthesize(ids, scaled_block, options)[:scaled]
    tail = synthesize(np.array([-row.line.number]), scaled - len(blocks), options)
    return np.concatenate([blocks, tail])


def synthesize(ids: NDArray[np.int64], length: int, options: TraceOptions) -> TokenIds:
    """`length` tokens for each id, one after the other: int32[len(ids) * length].

    splitmix64's finalizer (Steele et al., OOPSLA 2014) of seed, id and position; vectorised, and the same on
    every platform and version of numpy, which numpy's own generators do not promise.
    """
    low, high = options.vocab
    positions = np.arange(length, dtype=np.uint64)
    rooted = _mix(ids.astype(np.uint64) + _mix(np.array([options.seed], np.uint64)))
    mixed = _mix(rooted[:, None] + positions[None, :] * np.uint64(0x9E3779B97F4A7C15))
    return (low + (mixed % np.uint64(high - low)).astype(np.int32)).astype(np.int32).reshape(-1)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
