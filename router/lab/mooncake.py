"""Mooncake traces: lengths and block hashes instead of text (FAST'25 release of kvcache-ai/Mooncake).

    {"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [...],
     "session_id"?: "...", "delay"?: ms}

Hash id i stands for one block of the prompt; equal prefixes have equal ids. Tokens that no id covers (traces
that count full blocks only) are shared with nothing. Some rows carry `text_input` or `messages` in place of
`input_length`; those are sent as they are. In a session, `delay` is the time from the end of one turn to the
start of the next; a turn with it needs no timestamp.

Timestamps come in ticks (3 s in the released traces); requests stamped alike are spread evenly over the time
to the next stamp, at most 3 s, because all at once is an artefact of the recording.
"""

from collections.abc import Iterator
from itertools import chain, islice

from router.lab.blocks import Blocks
from router.lab.errors import TraceError
from router.lab.record import Json, Request
from router.lab.rows import GIVEN_BY, OnBad, Row, TraceOptions, refuse

_MARKS = ("hash_ids", "input_length", "text_input")
_USUAL_BLOCKS = (512, 16, 64, 32, 128, 256, 1024)
_SAMPLE_ROWS = 64
_MAX_TICK_S = 3.0


def sniff(data: Json) -> bool:
    """Whether the first row is stamped and has one of the fields that only this format has."""
    return "timestamp" in data and any(mark in data for mark in _MARKS)


def read(rows: Iterator[Row], options: TraceOptions, bad: OnBad = refuse) -> Iterator[Request]:
    """The requests of the file, with ticks spread."""
    timed = _timed(rows, bad)
    head = list(islice(timed, _SAMPLE_ROWS))
    block_size = options.block_size or infer_block_size([row for row, _ in head])
    origin: float | None = None
    for tick, begin_s, length_s in _ticks(chain(head, timed)):
        origin = begin_s if origin is None else origin
        for number, row in enumerate(tick):
            start_s = max(0.0, begin_s - origin) + length_s * number / len(tick)
            try:
                request = _request(row, start_s, block_size, options)
            except TraceError as error:
                bad(error)
                continue
            yield request


def _timed(rows: Iterator[Row], bad: OnBad) -> Iterator[tuple[Row, float]]:
    """The rows whose time and ids can be read, with their seconds on the trace's clock."""
    latest: dict[str, float] = {}  # of each session
    for row in rows:
        try:
            row.hash_ids(), row.count("input_length")  # what the block size is told from
            session, seconds = row.label("session_id"), _seconds(row, latest)
        except TraceError as error:
            bad(error)
            continue
        if session is not None:
            latest[session] = seconds
        yield row, seconds


def _seconds(row: Row, latest: dict[str, float]) -> float:
    stamp, delay = row.decimal("timestamp"), row.decimal("delay")
    if stamp is not None:
        return stamp / 1000
    session = row.label("session_id")
    if delay is None or session not in latest:
        raise row.error("no `timestamp` (milliseconds)")
    return latest[session] + delay / 1000  # at the earliest: how long answers take is not known here


def _ticks(timed: Iterator[tuple[Row, float]]) -> Iterator[tuple[list[Row], float, float]]:
    """Runs of rows stamped alike, their time, and the seconds they may be spread over."""
    tick: list[Row] = []
    begin_s = length_s = 0.0
    for row, seconds in timed:
        if tick and seconds != begin_s:
            length_s = min(_MAX_TICK_S, max(0.0, seconds - begin_s))
            yield tick, begin_s, length_s
            tick = []
        begin_s = seconds
        tick.append(row)
    if tick:
        yield tick, begin_s, length_s  # nothing follows: as long as the tick before


def infer_block_size(rows: list[Row]) -> int:
    """The usual size that explains most rows, whose ids count floor or ceil(input_length / size)."""
    lengths = [(row.count("input_length"), len(row.hash_ids())) for row in rows if row.data.get("hash_ids")]
    fits = {size: sum(_fits(length, ids, size) for length, ids in lengths) for size in _USUAL_BLOCKS}
    best = max(_USUAL_BLOCKS, key=lambda size: fits[size])
    if lengths and not fits[best]:
        raise rows[0].error(f"input_length and hash_ids fit no usual block size; give it with {GIVEN_BY}")
    return best


def _fits(length: int | None, ids: int, block_size: int) -> bool:
    return length is None or ids in (length // block_size, -(-length // block_size))


def _request(row: Row, timestamp_s: float, block_size: int, options: TraceOptions) -> Request:
    messages, text = row.objects("messages"), row.text("text_input")
    delay = row.decimal("delay")
    return Request(
        messages=messages,
        text=text if messages is None else None,
        blocks=prompt(row, block_size, options) if messages is None and text is None else None,
        max_tokens=answer_length(row),
        timestamp_s=timestamp_s,
        session_id=row.label("session_id"),
        think_s=None if delay is None else delay / 1000,
    )


def answer_length(row: Row) -> int | None:
    """`output_length`, one at least; None where the row does not say."""
    length = row.count("output_length")
    return None if length is None else max(1, length)


def prompt(row: Row, block_size: int, options: TraceOptions) -> Blocks:
    """The row's blocks. Raises TraceError if ids and length contradict each other."""
    length, ids = row.count("input_length", minimum=1), row.hash_ids()
    if length is None:
        raise row.error("no `input_length`, `text_input` or `messages`")
    if not _fits(length, len(ids), block_size) and ids:
        raise row.error(
            f"{len(ids)} hash_ids do not fit input_length {length} by blocks of {block_size} ({GIVEN_BY})"
        )
    return options.blocks(ids, block_size, length, own=row.number)
