"""Puts an engine together: model, tokenizer, KV blocks that fit, cache, recorded decode steps."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import torch

from kvcore.cache import PrefixCache
from kvcore.hashing import PrefixHasher
from kvcore.warm_up import warm_up
from replica.choice import EngineTokenizer
from replica.config import DTYPES, EngineConfig
from replica.engine import Engine
from replica.errors import ConfigError
from replica.limits import longest_context
from replica.memory import CudaMemory, allocate, gib, measured_blocks
from replica.model import Model
from replica.models import load_model, load_tokenizer
from replica.parallel.launch import ChildProcesses, Launch
from replica.parallel.model import ParallelModel, start

logger = logging.getLogger(__name__)

CPU_BLOCKS = 1024
"""KV blocks of a replica on a CPU that is not told how many: memory is taken as they fill."""

BuiltModel = Model | ParallelModel

_DTYPES = {name: getattr(torch, name) for name in DTYPES}


def build_engine(config: EngineConfig, launch: Launch = ChildProcesses) -> Engine:
    """Load everything an engine needs; `launch` starts the other ranks of a tensor-parallel one.

    Raises:
        ConfigError: an unknown dtype or device, the device has too little memory, or the model cannot be
            spread over `tensor_parallel` ranks.
        ModelError: the model cannot be had or read.
        EngineDead: another rank could not start.
    """
    config = settled(config)
    use_device(torch.device(config.device))
    model = _load(config, launch)
    try:
        return assemble(config, model, load_tokenizer(config.model))
    except BaseException:
        model.close()  # or other ranks would stay until somebody collects it
        raise


def assemble(config: EngineConfig, model: BuiltModel, tokenizer: EngineTokenizer) -> Engine:
    """An engine of a model that is loaded; `config` is `settled`.

    Raises:
        ConfigError: the device has too little memory.
    """
    blocks = _allocate(config, model)
    if replays(config, model):
        _record(config, model, longest_context(config, model.config.context_length, blocks))
    warm_up()
    hasher = PrefixHasher(config.hash_secret)
    cache = PrefixCache(blocks, config.block_size, hasher, policy=config.eviction)
    return Engine(config, model, tokenizer, cache)


def settled(config: EngineConfig) -> EngineConfig:
    """With dtype and device instead of "auto", and `overlap` decided. Raises `ConfigError` for what is not
    there."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.device(device).type
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r}: torch finds no GPU here")
    if kind == "cuda" and torch.device(device).index is None:
        device = f"cuda:{torch.cuda.current_device()}"
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if kind == "cuda" else "float32"
    overlap = kind == "cuda" if config.overlap is None else config.overlap
    return replace(config, device=device, dtype=dtype, overlap=overlap)


def use_device(device: torch.device) -> None:
    """Make it this thread's current one, which is where Triton launches kernels."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def replays(config: EngineConfig, model: BuiltModel) -> bool:
    """Whether decode steps are recorded. Raises `ConfigError` if they must be and cannot."""
    able = model.device.type == "cuda" and model.kernels.STATIC_PLANS
    if config.cuda_graphs and not able:
        raise ConfigError(
            f"cuda_graphs need a GPU and Triton's kernels, not {config.dtype} on {model.device}"
        )
    return able and config.cuda_graphs is not False


def _load(config: EngineConfig, launch: Launch) -> BuiltModel:
    device, dtype = torch.device(config.device), _DTYPES[config.dtype]
    try:
        if config.tensor_parallel > 1:
            return start(config, dtype, launch)
        return load_model(config.model, dtype=dtype, device=device)[0]
    except torch.OutOfMemoryError as error:
        memory = CudaMemory(device)
        raise ConfigError(
            f"the weights of {config.model} in {config.dtype} do not fit on {device}, which has "
            f"{gib(memory.total)}: take a smaller model or dtype"
        ) from error


def _allocate(config: EngineConfig, model: BuiltModel) -> int:
    """Make room for KV blocks; how many."""
    blocks, device = config.num_blocks, model.device
    if blocks is None:
        blocks = CPU_BLOCKS
        if device.type == "cuda":
            blocks = measured_blocks(config, model, CudaMemory(device), replays(config, model))
    allocate(config, model, blocks, partial(CudaMemory, device))
    return blocks


def _record(config: EngineConfig, model: BuiltModel, longest: int) -> None:
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
