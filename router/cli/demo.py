"""`warmroute demo`: the built-in workload against a real endpoint, once per policy, from cold caches."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from router.cli.cluster import deployed, free_port, local_ray
from router.cli.serve import default_threads
from router.config import AppConfig
from router.errors import ConfigError
from router.lab.client import Target
from router.lab.commands import check_writable, present
from router.lab.fitting import fitting_workload
from router.lab.progress import progress_bar
from router.lab.replay import ReplayOptions, replay
from router.lab.report import Report

POLICIES = ("round_robin", "least_load", "cache_aware")
"""In the order of the table."""
REPLICAS = 2
NUM_BLOCKS = 2048
"""KV blocks of 16 tokens per replica: room for every prefix of the workload, so routing alone decides."""
HOST = "127.0.0.1"


def demo(
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the table as JSON here (- for stdout).")
    ] = None,
    model: Annotated[str, typer.Option(help="Model to serve.")] = "smollm2-135m",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight (closed loop).")] = 6,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
) -> None:
    """Serve two CPU replicas and replay the built-in workload against them with each routing policy."""
    check_writable(json_file)
    _fetch(model)
    _say(f"starting a local Ray with {REPLICAS} CPU replicas of {model} ...")
    options, port = ReplayOptions(concurrency=concurrency, limit=limit), free_port()
    with local_ray(REPLICAS):
        reports = [_measure(replace(options, policy=policy), model, port) for policy in POLICIES]
    present(reports, [report.as_json() for report in reports], json_file)
    _say("Everything it started has been stopped. To keep an endpoint up: warmroute serve")
    if any(report.errors for report in reports):
        raise typer.Exit(1)


def _fetch(model: str) -> None:
    """Fetch a named model with a progress bar, before replicas would do it silently."""
    if Path(model).exists() or model.startswith("random:"):
        return
    # Another process: the weights are the replica's business, which the router does not import.
    command = [sys.executable, "-m", "router.cli", "models", "pull", model]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise ConfigError(f"cannot get the model {model}")


def _measure(options: ReplayOptions, model: str, port: int) -> Report:
    """One policy, on replicas that were just started and know nothing."""
    engine = {"num_blocks": NUM_BLOCKS, "threads": default_threads(REPLICAS)}
    config = AppConfig.model_validate(
        {"model": model, "policy": options.policy, "replicas": REPLICAS, "engine": engine}
    )
    with deployed(config, HOST, port) as url:
        requests = asyncio.run(fitting_workload(Target(url), _say))[: options.limit]
        _say(f"{options.policy}: replaying {len(requests)} requests ...")
        with progress_bar(f"{options.policy:<12}") as progress:
            report = asyncio.run(replay(requests, Target(url), options, progress))
    hit_rate = "unknown" if report.hit_rate is None else f"{report.hit_rate:.1%}"
    _say(f"{options.policy}: done in {report.duration_s:.0f} s, hit rate {hit_rate}")
    return report


def _say(line: str) -> None:
    """On stderr, whoever reads it: a log gets its lines while the demo runs."""
    typer.echo(line, err=True)
