"""Where compiled kernels are kept on disk, so that only the first start compiles them.

numba sees when a kernel's own file has changed, not when one that it calls into has, and would go on with the
old code. So the folder is named after all sources of this package.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba

log = logging.getLogger(__name__)

_config: Any = numba.config


def _folder() -> str | None:
    """None where nothing can be written, as in a read-only container or for a user without a home."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    try:
        base = os.environ.get("NUMBA_CACHE_DIR") or Path.home() / ".cache" / "warmroute"
        folder = Path(base) / "compiled" / hashlib.blake2b(sources, digest_size=8).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written")
    except (OSError, RuntimeError) as error:  # the latter from `home`
        log.info("no folder to keep compiled kernels in (%s): they are compiled at every start", error)
        return None
    return str(folder)


FOLDER = _folder()


@contextlib.contextmanager
def kept() -> Iterator[bool]:
    """Within, numba's `cache=True` means our folder; tells whether there is one."""
    usual = _config.CACHE_DIR
    _config.CACHE_DIR = FOLDER or usual
    try:
        yield FOLDER is not None
    finally:
        _config.CACHE_DIR = usual
