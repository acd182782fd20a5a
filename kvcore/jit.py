"""The one way in which this package compiles a function.

The loops over blocks are plain Python that numba compiles: a chain of 512 blocks is walked, compared and
counted in microseconds, one rule a line. A compiled call holds the GIL, so it is atomic to other threads.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])


def _folder() -> str:
    """Where machine code is kept: numba sees when a function's file has changed, not when one that it calls
    has, so the folder is named after all sources of the package."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    base = os.environ.get("NUMBA_CACHE_DIR") or Path.home() / ".cache" / "warmroute"
    return str(Path(base) / "compiled" / hashlib.blake2b(sources, digest_size=8).hexdigest())


_FOLDER = _folder()
_config: Any = numba.config


def jit(function: F) -> F:
    """`function`, compiled at its first call; the machine code is kept on disk where that is possible.

    Compiled functions must not allocate: they work in arrays that they are given. In return the arrays'
    reference counts can stay as they are (`_nrt`), which each call of a small step would spend 100 ns on.
    """
    options: dict[str, Any] = {"_nrt": False, "error_model": "numpy"}
    usual, _config.CACHE_DIR = _config.CACHE_DIR, _FOLDER
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for the cache, as in a read-only container without a home
        return numba.njit(**options)(function)
    finally:
        _config.CACHE_DIR = usual
