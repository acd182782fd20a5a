"""What Ctrl-C and the signals that end us do: one line, exit status 130, and all cleaning up comes first."""

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator

import typer

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended, as shells have it."""


def leave_calmly() -> None:
    """Let Ctrl-C end the program in one line from now on; whoever has something to clean up overrides it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores it
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> None:
    _say_so()
    raise SystemExit(INTERRUPTED)


def _say_so() -> None:
    typer.echo("stopping ...", err=True)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """The signals that end us raise KeyboardInterrupt inside, which leaves as SystemExit(130).

    Yields the function that listens for them once more, should somebody have taken them over. For the main
    thread only.
    """
    seen = False

    def interrupt(*_: object) -> None:
        nonlocal seen
        for name in SIGNALS:  # once is enough; another one would cut the cleaning up short
            signal.signal(name, signal.SIG_IGN)
        seen = True
        _say_so()
        raise KeyboardInterrupt

    def listen() -> None:
        # SIGINT too: a shell starts background jobs with it ignored.
        for name in SIGNALS:
            if name != signal.SIGHUP or before[name] != signal.SIG_IGN:  # nohup stays nohup
                signal.signal(name, interrupt)

    before = {name: signal.getsignal(name) for name in SIGNALS}
    listen()
    try:
        yield listen
    except (KeyboardInterrupt, SystemExit, Exception):
        if not seen:
            raise
        # A terminal's Ctrl-C reaches Ray's processes too, and their end may look like any error.
        logger.debug("what followed the interrupt", exc_info=True)
        raise SystemExit(INTERRUPTED) from None
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
