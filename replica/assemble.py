"""An engine around a model that is loaded: KV blocks that fit, recorded decode steps, the cache.

Needs neither files nor the libraries that read them, so that it runs wherever torch does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.ops import Kernels
from kvcore.cache import PrefixCache
from kvcore.hashing import PrefixHasher
from kvcore.warm_up import warm_up
from replica.batch import ForwardBatch
from replica.choice import EngineTokenizer
from replica.config import EngineConfig
from replica.engine import Engine
from replica.errors import ConfigError
from replica.limits import longest_context
from replica.memory import CudaMemory, allocate, gib, measured_blocks
from replica.model_config import ModelConfig

logger = logging.getLogger(__name__)

CPU_BLOCKS = 1024
"""KV blocks of a replica on a CPU that is not told how many: memory is taken as they fill."""


class LoadedModel(Protocol):
    """What an engine is put together from: `Model`, or `ParallelModel`, whose methods these are."""

    config: ModelConfig
    device: torch.device
    kernels: Kernels

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make room for KV blocks; replaces what was there."""

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one block in all layers."""

    def record_decodes(self, most: int, longest: int) -> None:
        """Record batches of up to `most` decodes, to be replayed."""

    def forward(self, batch: ForwardBatch, drawn: Tensor | None = None) -> Tensor:
        """Logits of the rows asked for."""

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first tokens of blocks."""

    def close(self) -> None:
        """End what else it keeps running."""


def assemble(config: EngineConfig, model: LoadedModel, tokenizer: EngineTokenizer) -> Engine:
    """An engine of a model that is loaded; `config` is `settled`.

    Raises:
        ConfigError: the device has too little memory.
    """
    blocks = _allocate(config, model)
    recorded = replays(config, model)
    if model.device.type == "cuda":
        longest = longest_context(config, model.config.context_length, blocks)
        if recorded:
            _record(config, model, longest)
        rehearse(model, config.block_size, longest)
    warm_up()
    hasher = PrefixHasher(config.hash_secret)
    cache = PrefixCache(blocks, config.block_size, hasher, policy=config.eviction)
    return Engine(config, model, tokenizer, cache)


def settled(config: EngineConfig) -> EngineConfig:
    """With dtype and device instead of "auto", and `overlap` decided. Raises `ConfigError` for what is not
    there."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = config.device if config.device != "auto" else "cuda" if gpus else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not gpus:
            raise ConfigError(f"device {name!r}: torch finds no GPU here")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        if device.index >= gpus:
            raise ConfigError(f"device {name!r}: torch finds {gpus} here, the last is cuda:{gpus - 1}")
    on_gpu = device.type == "cuda"
    return replace(
        config,
        device=str(device),
        dtype=config.dtype if config.dtype != "auto" else "bfloat16" if on_gpu else "float32",
        overlap=on_gpu if config.overlap is None else config.overlap,
    )


def use_device(device: torch.device) -> None:
    """Make it this thread's current one, which is where Triton launches kernels."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def replays(config: EngineConfig, model: LoadedModel) -> bool:
    """Whether decode steps are recorded. Raises `ConfigError` if they must be and cannot."""
    able = model.device.type == "cuda" and model.kernels.STATIC_PLANS
    if config.cuda_graphs and not able:
        raise ConfigError(
            f"cuda_graphs need a GPU and Triton's kernels, not {config.dtype} on {model.device}"
        )
    return able and config.cuda_graphs is not False


def rehearse(model: LoadedModel, block_size: int, longest: int) -> None:
    """Run what only some steps launch, so that it is compiled before requests wait for it: decodes beside a
    prefill, in a short context and in one of `longest` tokens, and a block copy. Writes to block 0."""
    blocks = np.zeros(-(-longest // block_size), dtype=np.int64)
    prefill = (np.zeros(2, dtype=np.int64), 0, blocks[:2], 1)
    for start in (0, longest - 1):
        decode = (np.zeros(1, dtype=np.int64), start, blocks[: start // block_size + 1], 1)
        model.forward(ForwardBatch.build([decode, prefill], block_size))
    model.copy_blocks([(0, 0, 1)])


def _allocate(config: EngineConfig, model: LoadedModel) -> int:
    """Make room for KV blocks; how many."""
    blocks, device = config.num_blocks, model.device
    if blocks is None:
        blocks = CPU_BLOCKS
        if device.type == "cuda":
            blocks = measured_blocks(config, model, CudaMemory(device), replays(config, model))
    allocate(config, model, blocks, partial(CudaMemory, device))
    return blocks


def _record(config: EngineConfig, model: LoadedModel, longest: int) -> None:
    memory = CudaMemory(model.device)
    free = memory.free()
    try:
        model.record_decodes(config.max_num_seqs, longest)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"CUDA graphs of up to {config.max_num_seqs} sequences do not fit into the {gib(free)} that the "
            f"KV blocks leave: lower memory_share ({config.memory_share}), num_blocks or max_num_seqs, or "
            "set cuda_graphs to false"
        ) from error
    logger.info("decode graphs take %s", gib(free - memory.free()))
