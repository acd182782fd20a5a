"""Errors of the lab, a branch of the router's tree.

    RouterError
    └── LabError
        ├── TraceError      a trace that cannot be read (names the file and, if there is one, the line)
        ├── TargetError     an endpoint that cannot be used at all: unreachable, 401, 404, 500, no model
        └── OptionError     options that contradict each other, or the trace

The messages are written for the person at the terminal.
"""

from collections.abc import Sequence

from router.errors import RouterError

_NAMED = 10


class LabError(RouterError):
    """Root of everything the lab raises on purpose."""


class TraceError(LabError):
    """A trace cannot be read; `path`, `line` (counted from 1, or None) and `what` say where and why."""

    def __init__(self, path: str, line: int | None, what: str) -> None:
        self.path = path
        self.line = line
        self.what = what
        where = path if line is None else f"{path}, line {line}"
        super().__init__(f"{where}: {what}")


def broken_lines(errors: Sequence[TraceError], what: str) -> TraceError:
    """One error for all broken lines of a trace: the first complaint, the others' numbers, and `what`."""
    first, *others = errors
    numbers = ", ".join(str(error.line) for error in others[:_NAMED]) + (", ..." if others[_NAMED:] else "")
    more = f"; {len(others)} more broken (line {numbers})" if others else ""
    return TraceError(first.path, first.line, f"{first.what}{more}; {what}")


class TargetError(LabError):
    """The endpoint cannot serve any request of a replay."""


class OptionError(LabError):
    """Options that contradict each other or what the trace holds."""
