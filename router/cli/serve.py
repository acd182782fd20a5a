"""`warmroute serve`: the endpoint on this machine, until Ctrl-C."""

import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from router.cli.cluster import check_endpoint, deployed, local_ray
from router.cli.interrupt import SIGNALS
from router.config import AppConfig
from router.errors import ConfigError


def load_config(path: Path | None, overrides: dict[str, Any]) -> AppConfig:
    """The application's arguments out of a serve.yaml (its first application's `args`), with overrides.

    Overrides that are None do not count.

    Raises:
        ConfigError: the file cannot be read, or a value is wrong; the message names each.
    """
    args = {} if path is None else dict(_read(path)["applications"][0].get("args") or {})
    engine = args.get("engine") or {}
    if isinstance(engine, dict):
        engine = {**engine, **_given(overrides.get("engine", {}))}
    merged = {**args, **_given(overrides), "engine": engine}
    try:
        return AppConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("; ".join(map(_explain, error.errors()))) from None


def load_address(path: Path | None, host: str | None, port: int | None) -> tuple[str, int]:
    """Where to listen: as given, else as a serve.yaml's `http_options` say, else 127.0.0.1:8000."""
    options = {} if path is None else _read(path).get("http_options") or {}
    return str(host or options.get("host") or "127.0.0.1"), int(port or options.get("port") or 8000)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    try:
        found = isinstance(document["applications"][0], dict)
    except (KeyError, IndexError, TypeError):
        found = False
    if not found:
        raise ConfigError(f"{path} is no Serve configuration: it has no applications")
    for name, value in {**document, **document["applications"][0]}.items():
        if name in ("http_options", "args") and not isinstance(value, dict | None):
            raise ConfigError(f"{path}: {name} must be names with values, not {value!r}")
    return document


def _explain(error: Any) -> str:
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"unknown option {where}; known: {', '.join(sorted(AppConfig.model_fields))}"
    return f"{where}: {error['msg'].removeprefix('Value error, ')}"


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def default_threads(processes: int) -> int:
    """Torch threads of each: this machine's cores shared out."""
    return max(1, (os.cpu_count() or 1) // processes)


def serve(
    model: Annotated[
        str | None, typer.Option(help="Named model, .gguf file, Hugging Face folder, random:tiny.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Model replicas (default 2).")] = None,
    policy: Annotated[str | None, typer.Option(help="cache_aware, least_load or round_robin.")] = None,
    host: Annotated[
        str | None, typer.Option(help="Address (default 127.0.0.1); others than loopback need API keys.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port (default 8000).")] = None,
    gpus: Annotated[float | None, typer.Option(min=0, help="GPUs per replica (default 0: CPUs).")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads per replica.")] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="KV blocks per replica.")] = None,
    config: Annotated[Path | None, typer.Option(help="A serve.yaml; the other options override it.")] = None,
) -> None:
    """Serve the endpoint on this machine until Ctrl-C."""
    from router.app import check

    overrides: dict[str, Any] = {"model": model, "replicas": replicas, "policy": policy, "replica_gpus": gpus}
    overrides["engine"] = {"threads": threads, "num_blocks": blocks}
    settings = load_config(config, overrides)
    host, port = load_address(config, host, port)
    check_endpoint(settings, host, port)
    check(settings)
    if settings.engine.get("threads") is None:
        processes = settings.replicas * int(settings.engine.get("tensor_parallel", 1))
        engine = {**settings.engine, "threads": default_threads(processes)}
        settings = settings.model_copy(update={"engine": engine})
    typer.echo(f"starting {settings.replicas} replicas of {settings.model} ...")
    with local_ray(settings.replicas * settings.replica_cpus), deployed(settings, host, port) as url:
        typer.echo(f"{url}/v1 is up (policy {settings.policy}); Ctrl-C ends it")
        if not settings.api_keys:
            typer.echo("no API keys are configured: open to every program on this machine")
        _until_signalled()
        typer.echo("stopping ...")


def _until_signalled() -> None:
    """Wait for SIGINT or SIGTERM; while everything is taken down, further ones do nothing."""
    seen: list[int] = []
    # A list, not an Event: handlers may run inside each other, and locks are not made for that.
    for name in SIGNALS:
        signal.signal(name, lambda number, _: seen.append(number))
    while not seen:
        time.sleep(0.2)
