"""Where compiled kernels are kept: in a folder named after the sources, or nowhere, but never beside them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("kernels.cpu")

SCRIPT = """
import os, pwd, sys
if sys.argv[1] == "stranger":  # a user whom this machine does not know, as containers have them
    def getpwuid(uid):
        raise KeyError(uid)
    pwd.getpwuid = getpwuid
import kernels.token_rows
from kernels import code_cache
print(code_cache.FOLDER)
"""


def cache_path(user, **variables):
    kept = {k: v for k, v in os.environ.items() if k not in ("HOME", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    command = [sys.executable, "-c", SCRIPT, user]
    run = subprocess.run(command, env=kept | variables, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def kept_in(folder):
    """Kinds of the files below a folder that numba keeps code in."""
    return sorted(file.suffix for file in Path(folder).rglob("*.nb?"))


def test_they_are_kept_in_the_home(tmp_path):
    folder = Path(cache_path("known", HOME=str(tmp_path)))
    assert folder.parent == tmp_path / ".cache" / "warmroute" / "compiled"
    assert kept_in(folder) == [".nbc"] * 3 + [".nbi"] * 3


def test_or_where_the_user_wants_it(tmp_path):
    assert Path(cache_path("stranger", NUMBA_CACHE_DIR=str(tmp_path))).parent == tmp_path / "compiled"
    assert kept_in(tmp_path) == [".nbc"] * 3 + [".nbi"] * 3


@pytest.mark.parametrize(("user", "variables"), [("stranger", {}), ("known", {"HOME": "/dev/null"})])
def test_or_nowhere(user, variables):
    sources = Path(__file__).parents[2] / "kernels"
    before = kept_in(sources)
    assert cache_path(user, **variables) == "None" and kept_in(sources) == before
