"""How many KV blocks fit beside a model: measured on the device at start, not guessed.

What a replica may use is `memory_share` of the device, together with whoever else is on it. Off that go what
is in use once the weights are there, what the largest step takes on top, and room for CUDA graphs; the rest
is KV blocks. What is left of the device is for fragmentation, and for attention's scratch at long contexts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from replica.batch import ForwardBatch
from replica.config import EngineConfig
from replica.decode_graphs import ladder
from replica.errors import ConfigError
from replica.model_config import ModelConfig

logger = logging.getLogger(__name__)

GRAPH_BYTES = 16 << 20
"""Set aside for each recorded decode graph, beside one largest step's memory that they share."""

MOST_BLOCKS = 1 << 20
"""More than that would cost gigabytes of host memory to keep account of."""


class DeviceMemory(Protocol):
    """The memory of one device, in bytes."""

    total: int

    def free(self) -> int:
        """Not taken by anybody now, all work done."""

    def release(self) -> None:
        """Give back what is only kept for reuse."""


class CudaMemory:
    """As the driver tells it, so that other processes and libraries count too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total = torch.cuda.mem_get_info(device)[1]

    def free(self) -> int:
        """Waits for the device."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.mem_get_info(self._device)[0]

    def release(self) -> None:
        """Empties torch's cache of blocks."""
        torch.cuda.empty_cache()


class ProfiledModel(Protocol):
    """What is measured."""

    config: ModelConfig

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make room for KV blocks; replaces what was there."""

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one block in all layers."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of the rows asked for."""


@dataclass(frozen=True)
class Use:
    """Bytes of a device.

    Attributes:
        total: of the device.
        free: once the weights are loaded.
        step: what the largest step takes on top.
        graphs: set aside for CUDA graphs.
    """

    total: int
    free: int
    step: int
    graphs: int

    def left(self, share: float) -> int:
        """For KV blocks, of `share` of the device; may be negative."""
        return int(self.total * share) - (self.total - self.free) - self.step - self.graphs


def fitting_blocks(use: Use, share: float, block_bytes: int) -> int:
    """KV blocks to allocate, beside the spare one that a model adds; 0 or less when nothing fits."""
    return min(use.left(share) // block_bytes - 1, MOST_BLOCKS)


def measured_blocks(config: EngineConfig, model: ProfiledModel, memory: DeviceMemory, graphs: bool) -> int:
    """KV blocks that fit beside a model whose weights are loaded; `graphs`: some will be recorded.

    Raises:
        ConfigError: not even one does; says what needs how much, and which settings change it.
    """
    model.allocate_kv(1, config.block_size)  # what an engine before this one had is no use of ours
    memory.release()
    free = memory.free()
    step = _step_bytes(config, model, memory, free)
    # The graphs' own memory is one step's, at most: of max_num_seqs tokens instead of max_batch_tokens.
    recorded = step + GRAPH_BYTES * len(ladder(config.max_num_seqs)) if graphs else 0
    use, block_bytes = Use(memory.total, free, step, recorded), model.kv_block_bytes(config.block_size)
    blocks = fitting_blocks(use, config.memory_share, block_bytes)
    figures = (
        f"{gib(use.total)} in all, {gib(use.free)} free beside the weights, {gib(use.step)} for a step of "
        f"{config.max_batch_tokens} tokens, {gib(use.graphs)} for CUDA graphs"
    )
    if blocks < 1:
        raise ConfigError(
            f"no room for KV blocks within memory_share {config.memory_share}: {figures}; a block takes "
            f"{gib(block_bytes)}. Lower max_batch_tokens ({config.max_batch_tokens}) or max_num_seqs "
            f"({config.max_num_seqs}), raise memory_share, or take a smaller model or dtype"
        )
    logger.info("%d KV blocks, %s; %s", blocks, gib(blocks * block_bytes), figures)
    return blocks


def _step_bytes(config: EngineConfig, model: ProfiledModel, memory: DeviceMemory, free: int) -> int:
    """What the largest step takes and would like to keep; the libraries it brings in are counted, too."""
    batch = largest_batch(config, model.config.context_length)
    try:
        model.allocate_kv(int(batch.block_tables.max()) + 1, config.block_size)
        logits = model.forward(batch)
        both = (logits, logits.float())  # draws work on a copy
        taken = free - memory.free()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of max_batch_tokens {config.max_batch_tokens} and max_num_seqs {config.max_num_seqs} "
            f"does not fit beside the weights: {gib(free)} of {gib(memory.total)} were free. Lower them, or "
            "take a smaller model or dtype"
        ) from error
    del logits, both
    memory.release()
    return max(taken, 0)


def largest_batch(config: EngineConfig, context_length: int) -> ForwardBatch:
    """max_batch_tokens new tokens, which want as many rows of logits as there can be sequences.

    Fewer tokens if no context is that long. All sequences use the same blocks: nobody reads what comes out.
    """
    rows = config.max_num_seqs
    lens = np.full(rows, config.max_batch_tokens // rows)
    lens[: config.max_batch_tokens % rows] += 1
    lens = np.minimum(lens, min(context_length, config.max_model_len or context_length))
    blocks = np.arange(-(-int(lens.max()) // config.block_size))
    return ForwardBatch.build([(np.zeros(n, dtype=np.int64), 0, blocks, 1) for n in lens], config.block_size)


def allocate(
    config: EngineConfig, model: ProfiledModel, blocks: int, memory: Callable[[], DeviceMemory]
) -> None:
    """Allocate KV blocks. Raises `ConfigError` when the device has no room for them."""
    try:
        model.allocate_kv(blocks, config.block_size)
    except torch.OutOfMemoryError as error:
        here, needed = memory(), (blocks + 1) * model.kv_block_bytes(config.block_size)
        raise ConfigError(
            f"num_blocks {blocks} takes {gib(needed)}, and {gib(here.free())} of {gib(here.total)} are free: "
            "lower num_blocks, or leave it out to have it measured"
        ) from error
    except MemoryError as error:  # of a CPU, whose memory is only taken as blocks fill
        needed = (blocks + 1) * model.kv_block_bytes(config.block_size)
        raise ConfigError(f"num_blocks {blocks} takes {gib(needed)}, more than this machine has") from error


def gib(nbytes: int) -> str:
    """For people: "1.5 GiB", or MiB below a tenth of that."""
    return f"{nbytes / 2**30:.1f} GiB" if abs(nbytes) >= 1e8 else f"{nbytes / 2**20:.2f} MiB"
