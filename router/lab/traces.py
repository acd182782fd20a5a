"""Reading traces: the format is told by content, never by the file's name, and a `.gz` by its magic bytes.

`read_trace` yields `Request`s one line at a time. A format is a pair of functions: `sniff` looks at the first
line that is not blank, `read` turns lines into requests; `FORMATS` lists what is known. The name `builtin`
(or `builtin:tiny`) is the synthesized workload; a file of that name is reached as `./builtin`.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from router.lab import mooncake, openai_chat
from router.lab.errors import TraceError
from router.lab.record import Request
from router.lab.rows import Line, OnBad, TraceOptions, refuse
from router.lab.workload import TINY, WorkloadConfig, builtin_workload

_BUILTIN = {"builtin": WorkloadConfig(), "builtin:tiny": TINY}


@dataclass(frozen=True)
class TraceFormat:
    """One kind of trace file: how to tell it by its first line, and how to read it."""

    name: str
    sniff: Callable[[Line], bool]
    read: Callable[[Iterator[Line], TraceOptions, OnBad], Iterator[Request]]


FORMATS = (
    TraceFormat("Mooncake JSONL", mooncake.sniff, mooncake.read),
    TraceFormat("OpenAI chat JSONL", openai_chat.sniff, openai_chat.read),
)


def read_trace(
    trace: str | Path, options: TraceOptions | None = None, bad: OnBad = refuse
) -> Iterator[Request]:
    """The requests of `trace` (a path, `builtin` or `builtin:tiny`) in the order of the file.

    Opens the file and tells its format before it returns; the rest is read as it is consumed. A line that
    is wrong is left out if `bad`, which is told of it, does not raise. Raises TraceError, here or while it is
    consumed: no such file, empty, damaged gzip, unknown format.
    """
    name = str(trace)
    if name in _BUILTIN:
        return iter(builtin_workload(_BUILTIN[name]))
    if name.startswith("builtin:"):
        raise TraceError(name, None, f"no such built-in workload; there are: {', '.join(_BUILTIN)}")
    lines = _lines(Path(trace), bad)
    for line in lines:
        if (known := _format(line, bad)) is not None:
            return known.read(chain([line], lines), options or TraceOptions(), bad)
    raise TraceError(name, None, "the trace is empty")


def _format(line: Line, bad: OnBad) -> TraceFormat | None:
    """The format that this line is of; None for a broken line, which could be of any."""
    for known in FORMATS:
        if known.sniff(line):
            return known
    try:
        if line.text.lstrip().startswith("{"):
            line.row()
    except TraceError as error:
        bad(error)
        return None
    names = ", ".join(known.name for known in FORMATS)
    raise line.error(f"not a trace that is known here; known formats: {names}")


def _lines(path: Path, bad: OnBad) -> Iterator[Line]:
    """The lines that are not blank, numbered as in the (unpacked) file."""
    source = str(path)
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, start=1):
                if not raw.strip():
                    continue
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    what = f"not UTF-8 text ({error.reason} at byte {error.start})"
                    bad(TraceError(source, number, what))
                    continue
                yield Line(source, number, text)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise TraceError(source, None, f"damaged gzip file ({error})") from error
    except FileNotFoundError:
        raise TraceError(source, None, "no such file") from None
    except OSError as error:
        raise TraceError(source, None, f"cannot be read ({error.strerror or error})") from error


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if packed else path.open("rb")  # type: ignore[return-value]
