"""Nothing that a command started outlives it: Ray's and Serve's processes are swept up at the end.

Ray ends its processes on `ray.shutdown`, unless a Ctrl-C in the terminal, which reaches the whole process
group, has broken them up before; then HAProxy or an agent may stay behind, its parent gone.
"""

import contextlib
import ctypes
import sys
from collections.abc import Iterator

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 5.0


@contextlib.contextmanager
def no_process_left() -> Iterator[None]:
    """Inside, orphans of our descendants become ours (Linux); at the end, what was started is ended."""
    before = set(psutil.Process().children(recursive=True))
    _adopt_orphans(True)
    try:
        yield
    finally:
        _end([p for p in psutil.Process().children(recursive=True) if p not in before])
        _adopt_orphans(False)


def _adopt_orphans(wanted: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=_GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_GRACE_S)
