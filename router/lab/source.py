"""A trace file as a stream of rows, whatever holds them: JSON lines, a JSON array, JSON objects one after the
other, or CSV with a header; plain or gzip, both told by content.

Only one row is in memory at a time, and for arrays a buffer of the file. A row that is broken is reported
with its line's number, and left out if that is allowed.
"""

import csv
import gzip
import json
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from router.lab.errors import OptionError, TraceError
from router.lab.record import Json
from router.lab.rows import OnBad, Row, describe

_CHUNK = 1 << 20
_MARK = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{}]', re.DOTALL)  # a whole string, its begin, a bracket


def read_rows(path: Path, bad: OnBad) -> Iterator[Row]:
    """The rows of the file. Raises TraceError: no such file, damaged gzip, neither JSON nor CSV."""
    try:
        with _open(path) as file:
            yield from _rows(str(path), file, bad)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise TraceError(str(path), None, f"damaged gzip file ({error})") from error
    except FileNotFoundError:
        raise TraceError(str(path), None, "no such file") from None
    except OSError as error:
        raise TraceError(str(path), None, f"cannot be read ({error.strerror or error})") from error


def write_rows(rows: Iterable[Json], path: str) -> None:
    """JSON lines, packed where the name ends in .gz. Raises OptionError: the file cannot be written."""
    lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()
    try:
        Path(path).write_bytes(gzip.compress(lines, mtime=0) if path.endswith(".gz") else lines)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror}") from error


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if packed else path.open("rb")  # type: ignore[return-value]


def _rows(source: str, file: BinaryIO, bad: OnBad) -> Iterator[Row]:
    if _begins_with_elements(file):
        return (yield from _elements(source, file, bad))
    lines = _lines(source, file, bad)
    for number, first in lines:
        start = first.strip()
        if start.startswith("{"):
            return (yield from _json_lines(source, chain([(number, first)], lines), bad))
        if "," in start:
            return (yield from _csv_rows(source, chain([(number, first)], lines), bad))
        raise TraceError(source, number, f"neither JSON nor CSV: {describe(start)}")


def _begins_with_elements(file: BinaryIO) -> bool:
    """Whether the file is an array, or begins with an object of several lines: all of it may be one line."""
    start = b""
    while not start and (chunk := file.read(_CHUNK)):
        start = chunk.removeprefix(BOM_UTF8).lstrip()
    file.seek(0)
    return start.startswith(b"[") or start.partition(b"\n")[0].strip() == b"{"


def _lines(source: str, file: BinaryIO, bad: OnBad) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, numbered as in the (unpacked) file."""
    for number, raw in enumerate(file, start=1):
        if not raw.strip():
            continue
        try:
            yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            bad(TraceError(source, number, f"not UTF-8 text ({error.reason} at byte {error.start})"))


def _json_lines(source: str, lines: Iterator[tuple[int, str]], bad: OnBad) -> Iterator[Row]:
    for number, text in lines:
        try:
            yield Row(source, number, _object(source, number, text))
        except TraceError as error:
            bad(error)


def _csv_rows(source: str, lines: Iterator[tuple[int, str]], bad: OnBad) -> Iterator[Row]:
    """A row's fields are named by the header, in lower case, and are numbers where they read as such."""
    header = [name.strip().lower() for name in _cells(source, *next(lines))]
    for number, text in lines:
        try:
            values = _cells(source, number, text)
            if len(values) != len(header):
                what = f"{len(values)} values under {len(header)} column names"
                raise TraceError(source, number, what)
        except TraceError as error:
            bad(error)
            continue
        yield Row(source, number, dict(zip(header, map(_value, values), strict=True)))


def _cells(source: str, number: int, text: str) -> list[str]:
    try:
        return next(csv.reader([text]))
    except csv.Error as error:
        raise TraceError(source, number, f"not CSV ({error})") from error


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip() or None


def _object(source: str, number: int, text: str) -> Json:
    """The JSON object in a text; raises TraceError if there is none."""
    try:
        data = json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        raise TraceError(source, number, f"not valid JSON ({error})") from error
    except RecursionError:
        raise TraceError(source, number, "not valid JSON (nested too deeply)") from None
    if not isinstance(data, dict):
        raise TraceError(source, number, f"a JSON object is expected, not {describe(data)}")
    return data


def _refuse(constant: str) -> None:
    """NaN and the infinities are Python's, not JSON's; no endpoint would accept them."""
    raise ValueError(f"{constant} is not a JSON value")


def _elements(source: str, file: BinaryIO, bad: OnBad) -> Iterator[Row]:
    """The objects of a JSON array, or JSON objects that take several lines each.

    Brackets are counted, outside of strings, to find where an object ends: so a broken one does not take the
    rest of the file with it.
    """
    text = TextIOWrapper(file, "utf-8-sig")
    scan = _Scan()
    try:
        while chunk := text.read(_CHUNK):
            for number, element in scan.feed(chunk):
                try:
                    yield Row(source, number, _object(source, number, element))
                except TraceError as error:
                    bad(error)
    except UnicodeDecodeError as error:
        raise TraceError(
            source, scan.line, f"not UTF-8 text ({error.reason}) at this line or later"
        ) from error
    if scan.depth:
        bad(TraceError(source, scan.line, "not valid JSON (the file ends within this value)"))


class _Scan:
    """Cuts text into the elements of a top-level array, or into top-level values.

    `depth` counts the open brackets; `line` is where the text begins that was not handed out yet.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.line = 1
        self._text = ""
        self._scanned = 0
        self._begin = 0  # of what was not handed out yet
        self._outer: int | None = None  # the depth between elements: 1 in an array, 0 without one

    def feed(self, chunk: str) -> Iterator[tuple[int, str]]:
        """The elements that end in the text so far, each with the line on which it begins.

        What stands between elements, and should not, comes as an element too.
        """
        self._text += chunk
        scanned = len(self._text)
        for mark in _MARK.finditer(self._text, self._scanned):
            sign = mark[0]
            if sign == '"':  # the string goes on in the next chunk
                scanned = mark.start()
                break
            if sign in ("[", "{"):
                yield from self._opened(sign, mark.start())
            elif sign in ("]", "}"):
                yield from self._closed(mark.end())
        self._text, self._scanned, self._begin = self._text[self._begin :], scanned - self._begin, 0

    def _opened(self, sign: str, at: int) -> Iterator[tuple[int, str]]:
        if self._outer is None:
            self._outer = int(sign == "[")
            if sign == "[":
                self._take(at + 1)
        elif self.depth == self._outer:
            yield from self._stray(at)
        self.depth += 1

    def _closed(self, end: int) -> Iterator[tuple[int, str]]:
        self.depth = max(0, self.depth - 1)
        if self._outer and not self.depth:  # the array ends
            yield from self._stray(end - 1)
            self._take(end)
            self._outer = None
        elif self.depth == self._outer:
            yield self._take(end)

    def _stray(self, end: int) -> Iterator[tuple[int, str]]:
        number, text = self._take(end)
        if stray := text.strip(" \t\r\n,"):
            yield number, stray

    def _take(self, end: int) -> tuple[int, str]:
        number, text = self.line, self._text[self._begin : end]
        self._begin = end
        self.line += text.count("\n")
        return number, text
