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
from router.lab.rows import Line, TraceOptions
from router.lab.workload import TINY, WorkloadConfig, builtin_workload

_BUILTIN = {"builtin": WorkloadConfig(), "builtin:tiny": TINY}


@dataclass(frozen=True)
class TraceFormat:
    """One kind of trace file: how to tell it by its first line, and how to read it."""

    name: str
    sniff: Callable[[Line], bool]
    read: Callable[[Iterator[Line], TraceOptions], Iterator[Request]]


FORMATS = (
    TraceFormat("Mooncake JSONL", mooncake.sniff, mooncake.read),
    TraceFormat("OpenAI chat JSONL", openai_chat.sniff, openai_chat.read),
)


def read_trace(trace: str | Path, options: TraceOptions | None = None) -> Iterator[Request]:
    """The requests of `trace` (a path, `builtin` or `builtin:tiny`) in the order of the file.

    Opens the file and tells its format before it returns; the rest is read as it is consumed. Raises
    TraceError, here or while it is consumed: no such file, empty, damaged gzip, unknown format, or a line
    that is wrong.
    """
    builtin = _BUILTIN.get(str(trace))
    if builtin is not None:
        return iter(builtin_workload(builtin))
    lines = _lines(Path(trace))
    first = next(lines, None)
    if first is None:
        raise TraceError(str(trace), None, "the trace is empty")
    for known in FORMATS:
        if known.sniff(first):
            return known.read(chain([first], lines), options or TraceOptions())
    if first.text.lstrip().startswith("{"):
        first.row()  # a broken first line says what is broken
    names = ", ".join(known.name for known in FORMATS)
    raise first.error(f"not a trace that is known here; known formats: {names}")


def _lines(path: Path) -> Iterator[Line]:
    """The lines that are not blank, numbered as in the (unpacked) file."""
    source = str(path)
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield Line(source, number, _text(source, number, raw))
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


def _text(source: str, number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(source, number, f"not UTF-8 text ({error.reason} at byte {error.start})") from error
