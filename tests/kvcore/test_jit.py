"""Where compiled code is kept: in a folder named after the sources, or nowhere, but never beside them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, pwd, sys
if sys.argv[1] == "stranger":  # a user whom this machine does not know, as containers have them
    def getpwuid(uid):
        raise KeyError(uid)
    pwd.getpwuid = getpwuid
from kvcore import blocks, index
blocks.take_free(blocks.make_pool(2, 1, index.make_slots(2), 0, 0.0))
print(blocks.take_free._cache.cache_path)
"""


def cache_path(user, **variables):
    kept = {k: v for k, v in os.environ.items() if k not in ("HOME", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, user],
        env=kept | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip(), run.stderr


def test_it_is_kept_in_the_home(tmp_path):
    path, said = cache_path("known", HOME=str(tmp_path))
    assert Path(path).parents[1] == tmp_path / ".cache" / "warmroute" / "compiled" and said == ""


def test_or_where_the_user_wants_it(tmp_path):
    path, said = cache_path("stranger", NUMBA_CACHE_DIR=str(tmp_path))
    assert Path(path).parents[1] == tmp_path / "compiled" and said == ""


@pytest.mark.parametrize(
    ("user", "variables"),
    [("stranger", {}), ("known", {"HOME": "/dev/null"}), ("known", {"NUMBA_CACHE_DIR": "/dev/null/x"})],
)
def test_or_nowhere(user, variables):
    path, said = cache_path(user, **variables)
    assert path == "None" and "compiled code cannot be kept" in said
