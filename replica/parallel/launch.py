"""Who starts the other ranks: here as plain child processes; `replica.deployment` has them as Ray actors."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from replica.errors import ConfigError
from replica.parallel.follower import Task, command

_ROOT = Path(__file__).resolve().parents[2]
_LOOK_EVERY_S = 0.01


class Followers(Protocol):
    """The processes of ranks 1 ... of one model."""

    def lost(self, wait_s: float = 0.0) -> str | None:
        """Which of them has ended, and how; None when none has, nor does within `wait_s` seconds."""

    def stop(self) -> None:
        """End them. Safe to call twice."""


Launch = Callable[[Sequence[Task]], Followers]
"""Starts a process for each task."""


class ChildProcesses:
    """Ranks that are this process's children; on CUDA, rank n takes the n-th device after rank 0's.

    Raises `ConfigError` when there are not as many devices.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        _check_devices([torch.device(on_own_device(task).device) for task in tasks])
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._children = {
            task.rank: subprocess.Popen(
                command(on_own_device(task)),
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in the terminal is rank 0's to act upon
            )
            for task in tasks
        }

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: child.pid for rank, child in self._children.items()}

    def lost(self, wait_s: float = 0.0) -> str | None:
        """See `Followers.lost`."""
        deadline = time.monotonic() + wait_s
        while True:
            codes = {rank: child.poll() for rank, child in self._children.items()}
            ended = {rank: code for rank, code in codes.items() if code is not None}
            if ended:
                # With 0 end those that another rank's end has left alone.
                rank = max(ended, key=lambda rank: ended[rank] != 0)
                return f"rank {rank} ended with exit code {ended[rank]}"
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_EVERY_S)

    def stop(self) -> None:
        """Kill them: they hold nothing that needs saving."""
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait()


def _check_devices(devices: Sequence[torch.device]) -> None:
    last = max((device.index or 0 for device in devices if device.type == "cuda"), default=-1)
    if last >= torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel {len(devices) + 1} needs GPUs up to cuda:{last}, a rank each; torch finds "
            f"{torch.cuda.device_count()} here"
        )


def on_own_device(task: Task) -> Task:
    """The task with rank n's device; given is that of rank 0."""
    device = torch.device(task.device)
    return task if device.type != "cuda" else replace(task, device=f"cuda:{(device.index or 0) + task.rank}")
