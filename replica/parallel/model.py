"""Rank 0: a model that several processes compute together, to the engine like any other.

Whatever fails in one rank leaves the others in the middle of something. So nothing is repaired: the engine
dies with a message that says which rank failed and why, and its replica is replaced.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor

from replica.batch import ForwardBatch
from replica.config import EngineConfig
from replica.errors import EngineDead
from replica.model import Model
from replica.model_config import ModelConfig
from replica.models import load_config, load_model
from replica.parallel.follower import Task, arrived_key, failed_key, loaded_key
from replica.parallel.group import Group, open_store
from replica.parallel.launch import ChildProcesses, Followers, Launch
from replica.parallel.orders import Order
from replica.parallel.shard import Shard, check_split

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 0.02
# A process that was killed closes its connections a moment before its parent can know of its end.
_NEWS_S = 1.0


class ParallelModel:
    """A `ForwardModel` of all ranks. `close` ends the others; so does this process's end."""

    def __init__(
        self, model: Model, config: ModelConfig, group: Group, store: dist.TCPStore, followers: Followers
    ) -> None:
        self.config = config
        self.device = model.device
        self.kernels = model.kernels
        self._model = model
        self._group = group
        self._store = store
        self._followers = followers
        self._failure: str | None = None
        self._stop = weakref.finalize(self, followers.stop)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """See `Model.allocate_kv`; each rank has the KV of its own heads."""
        self._everywhere(Order.allocate(num_blocks, block_size))

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one block in all layers on this rank's device; the others take as much."""
        return self._model.kv_block_bytes(block_size)

    def record_decodes(self, most: int, longest: int) -> None:
        """See `Model.record_decodes`."""
        self._everywhere(Order.record(most, longest))

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """See `Model.copy_blocks`."""
        self._everywhere(Order.copy(copies))

    def forward(self, batch: ForwardBatch, drawn: Tensor | None = None) -> Tensor:
        """See `Model.forward`."""
        logits = self._everywhere(Order.forward(batch, drawn))
        assert logits is not None, "a forward pass gives logits"
        return logits

    def close(self) -> None:
        """End the other ranks; nothing can be computed any more."""
        self._failure = self._failure or "the model is closed"
        self._stop()

    def _everywhere(self, order: Order) -> Tensor | None:
        """Carry an order out on every rank. Raises `EngineDead` if that fails on any."""
        if self._failure is not None:
            raise EngineDead(self._failure)
        try:
            self._group.tell(order)
            result = order.carry_out(self._model)
            self._group.agree()
            return result
        except Exception as error:  # whatever it is, the other ranks wait for something that does not come
            self._failure = f"tensor parallelism broke down: {self._cause(error)}"
            self._stop()
            raise EngineDead(self._failure) from error

    def _cause(self, error: Exception) -> str:
        if not isinstance(error, EngineDead):
            return f"rank 0 failed: {type(error).__name__}: {error}"
        lost = self._followers.lost(_NEWS_S)
        return _reported(self._store, self._group.shard.size) or lost or str(error)


def start(config: EngineConfig, dtype: torch.dtype, launch: Launch = ChildProcesses) -> ParallelModel:
    """Load a model on `config.tensor_parallel` ranks; this process is rank 0.

    Raises:
        ConfigError: the model cannot be spread over that many ranks.
        ModelError: it cannot be had or read.
        EngineDead: another rank failed, or did not come to be.
    """
    size = config.tensor_parallel
    check_split(load_config(config.model), size)
    store = open_store(size)
    followers = launch([_task(config, rank, store.port) for rank in range(1, size)])
    with ExitStack() as undo:
        undo.callback(followers.stop)
        _await(arrived_key, store, followers, size)
        device = torch.device(config.device)
        group = Group(store, Shard(0, size), device, config.parallel_timeout_s)
        model, whole = load_model(config.model, dtype, device, group)
        _await(loaded_key, store, followers, size)
        undo.pop_all()
    logger.info("%s is spread over %d processes", config.model, size)
    return ParallelModel(model, whole, group, store, followers)


def _task(config: EngineConfig, rank: int, port: int) -> Task:
    return Task(
        rank=rank,
        size=config.tensor_parallel,
        port=port,
        model=config.model,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        timeout_s=config.parallel_timeout_s,
    )


def _await(key: Callable[[int], str], store: dist.TCPStore, followers: Followers, size: int) -> None:
    """Return when all other ranks have set their key."""
    keys = [key(rank) for rank in range(1, size)]
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not store.check(keys):
        lost = followers.lost()
        if failure := _reported(store, size) or lost:
            raise EngineDead(f"tensor parallelism could not start: {failure}")
        if time.monotonic() > deadline:
            raise EngineDead(f"tensor parallelism did not start within {_START_TIMEOUT_S:g} s")
        time.sleep(_LOOK_EVERY_S)


def _reported(store: dist.TCPStore, size: int) -> str | None:
    """What the other ranks say of their own errors."""
    failed = [rank for rank in range(1, size) if store.check([failed_key(rank)])]
    told = (f"rank {rank} failed: {store.get(failed_key(rank)).decode()}" for rank in failed)
    return "; ".join(told) or None
