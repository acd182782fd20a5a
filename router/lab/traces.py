"""Reading traces: the format is told by content, never by the file's name, and a `.gz` by its magic bytes.

`read_trace` yields `Request`s one row at a time. A format is a pair of functions: `sniff` looks at the first
row that is not broken, `read` turns rows into requests; `FORMATS` lists what is known. The name `builtin`
(or `builtin:tiny`) is the synthesized workload; a file of that name is reached as `./builtin`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from router.lab import bailian, lengths, mooncake, openai_chat, sharegpt, transcripts, weka
from router.lab.errors import TraceError
from router.lab.modifiers import scaled
from router.lab.record import Json, Request
from router.lab.rows import OnBad, Row, TraceOptions, refuse
from router.lab.source import read_rows
from router.lab.workload import TINY, WorkloadConfig, builtin_workload

_BUILTIN = {"builtin": WorkloadConfig(), "builtin:tiny": TINY}


@dataclass(frozen=True)
class TraceFormat:
    """One kind of trace file: how to tell it by its first row, and how to read it."""

    name: str
    sniff: Callable[[Json], bool]
    read: Callable[[Iterator[Row], TraceOptions, OnBad], Iterator[Request]]


FORMATS = (
    TraceFormat("Bailian JSONL", bailian.sniff, bailian.read),
    TraceFormat("WEKA sessions", weka.sniff_sessions, weka.read_sessions),
    TraceFormat("WEKA sessions, compact", weka.sniff_requests, weka.read_requests),
    TraceFormat("Azure or BurstGPT CSV", lengths.sniff, lengths.read),
    TraceFormat("ShareGPT", sharegpt.sniff_text, sharegpt.read_text),
    TraceFormat("ShareGPT tokens", sharegpt.sniff_tokens, sharegpt.read_tokens),
    TraceFormat("agent calls JSONL", transcripts.sniff_calls, transcripts.read_calls),
    TraceFormat("tau-bench runs", transcripts.sniff_runs, transcripts.read_runs),
    TraceFormat("Mooncake JSONL", mooncake.sniff, mooncake.read),
    TraceFormat("OpenAI chat JSONL", openai_chat.sniff, openai_chat.read),
)


def read_trace(
    trace: str | Path, options: TraceOptions | None = None, bad: OnBad = refuse
) -> Iterator[Request]:
    """The requests of `trace` (a path, `builtin` or `builtin:tiny`) in the order of the file.

    Sessions that are recorded one after the other without a common clock (WEKA's) come in the order of time.
    Opens the file and tells its format before it returns; the rest is read as it is consumed. A row that
    is wrong is left out if `bad`, which is told of it, does not raise. Raises TraceError, here or while it is
    consumed: no such file, empty, damaged gzip, unknown format.
    """
    name = str(trace)
    if name in _BUILTIN:
        return iter(builtin_workload(_BUILTIN[name]))
    if name.startswith("builtin:"):
        raise TraceError(name, None, f"no such built-in workload; there are: {', '.join(_BUILTIN)}")
    options = options or TraceOptions()
    rows = read_rows(Path(trace), bad)
    first = next(rows, None)
    if first is None:
        raise TraceError(name, None, "the trace is empty")
    for known in FORMATS:
        if known.sniff(first.data):
            return scaled(known.read(chain([first], rows), options, bad), options.scale)
    names = ", ".join(known.name for known in FORMATS)
    raise first.error(f"not a trace that is known here; known formats: {names}")
