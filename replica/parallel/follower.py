"""A rank other than 0: a process that loads its part of the model and does what rank 0 tells it.

An error of its own ends it, and so does the end of rank 0.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NoReturn

import torch

from replica.errors import EngineDead
from replica.models import load_model
from replica.parallel.group import Group, join_store
from replica.parallel.shard import Shard

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """What one rank must know to take part; `port` is that of rank 0's store on this node.

    The other fields are those of `EngineConfig`; `device` is as this process calls it.
    """

    rank: int
    size: int
    port: int
    model: str
    dtype: str
    device: str
    threads: int | None
    timeout_s: float


def arrived_key(rank: int) -> str:
    """Set in the store by a rank that is ready to connect."""
    return f"arrived/{rank}"


def loaded_key(rank: int) -> str:
    """Set by a rank that has its part of the model."""
    return f"loaded/{rank}"


def failed_key(rank: int) -> str:
    """Set, to what happened, by a rank that is about to end because of an error of its own."""
    return f"failed/{rank}"


def follow(task: Task) -> NoReturn:
    """Take part in a model until rank 0 goes; then end this process, with exit code 1 after an error."""
    store = None
    try:
        store = join_store(task.port, task.size)
        _work(task, store)
    except EngineDead as error:
        logger.info("rank %d ends: %s", task.rank, error)
        _end(0)
    except Exception as error:  # whatever it is, rank 0 must hear of it
        logger.critical("rank %d failed", task.rank, exc_info=error)
        with suppress(RuntimeError):  # rank 0 may have gone meanwhile
            if store is not None:
                store.set(failed_key(task.rank), f"{type(error).__name__}: {error}")
        _end(1)


def _work(task: Task, store: torch.distributed.TCPStore) -> NoReturn:
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    device = torch.device(task.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store.set(arrived_key(task.rank), "")
    group = Group(store, Shard(task.rank, task.size), device, task.timeout_s)
    model, _ = load_model(task.model, getattr(torch, task.dtype), device, group)
    store.set(loaded_key(task.rank), "")
    while True:
        group.hear().carry_out(model)
        group.agree()


def _end(code: int) -> NoReturn:
    # Not sys.exit: the other ranks wait for this one's connections to close, which no `finally`, and no
    # thread of a library that waits for another rank, may hold up.
    logging.shutdown()
    os._exit(code)


def command(task: Task) -> list[str]:
    """The command line that starts a rank as a process of its own."""
    return [sys.executable, "-m", "replica.parallel.follower", json.dumps(asdict(task))]


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(asctime)s %(name)s -- %(message)s")
    follow(Task(**json.loads(sys.argv[1])))
