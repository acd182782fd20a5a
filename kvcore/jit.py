"""The one way in which this package compiles a function.

The loops over blocks are plain Python that numba compiles: a chain of 512 blocks is walked, compared and
counted in microseconds, one rule a line. A compiled call holds the GIL, so it is atomic to other threads.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., object])


def _folder() -> str | None:
    """Where machine code is kept: numba sees when a function's file has changed, not when one that it calls
    has, so the folder is named after all sources of the package. None where nothing can be written, as in a
    read-only container or for a user without a home."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    try:
        base = os.environ.get("NUMBA_CACHE_DIR") or Path.home() / ".cache" / "warmroute"
        folder = Path(base) / "compiled" / hashlib.blake2b(sources, digest_size=8).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written")
    except (OSError, RuntimeError) as error:  # the latter from `home`
        logger.warning("compiled code cannot be kept, every start takes about 10 s longer: %s", error)
        return None
    return str(folder)


_FOLDER = _folder()
_config: Any = numba.config


def jit(function: F) -> F:
    """`function`, compiled at its first call; the machine code is kept on disk where that is possible.

    Compiled functions must not allocate: they work in arrays that they are given. In return the arrays'
    reference counts can stay as they are (`_nrt`), which each call of a small step would spend 100 ns on.
    """
    options: dict[str, Any] = {"_nrt": False, "error_model": "numpy"}
    if _FOLDER is None:  # numba's own choice of a folder would serve code of older sources
        return numba.njit(**options)(function)
    usual, _config.CACHE_DIR = _config.CACHE_DIR, _FOLDER
    try:
        return numba.njit(cache=True, **options)(function)
    finally:
        _config.CACHE_DIR = usual
