"""Puts an engine together: model, tokenizer, cache, KV blocks."""

from __future__ import annotations

import torch

from kvcore.cache import PrefixCache
from kvcore.hashing import PrefixHasher
from kvcore.warm_up import warm_up
from replica.config import EngineConfig
from replica.engine import Engine
from replica.errors import ConfigError
from replica.model import Model
from replica.models import load_model, load_tokenizer
from replica.parallel.launch import ChildProcesses, Launch
from replica.parallel.model import ParallelModel, start

_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


def build_engine(config: EngineConfig, launch: Launch = ChildProcesses) -> Engine:
    """Load everything an engine needs; `launch` starts the other ranks of a tensor-parallel one.

    Raises:
        ConfigError: an unknown dtype, or a model that cannot be spread over `tensor_parallel` ranks.
        ModelError: the model cannot be had or read.
        EngineDead: another rank could not start.
    """
    if config.dtype not in _DTYPES:
        raise ConfigError(f"dtype {config.dtype!r} is none of {', '.join(_DTYPES)}")
    model: Model | ParallelModel
    if config.tensor_parallel > 1:
        model = start(config, _DTYPES[config.dtype], launch)
    else:
        model, _ = load_model(config.model, dtype=_DTYPES[config.dtype], device=config.device)
    try:
        return _assemble(config, model)
    except BaseException:
        model.close()  # or other ranks would stay until somebody collects it
        raise


def _assemble(config: EngineConfig, model: Model | ParallelModel) -> Engine:
    model.allocate_kv(config.num_blocks, config.block_size)
    warm_up()
    hasher = PrefixHasher(config.hash_secret)
    cache = PrefixCache(config.num_blocks, config.block_size, hasher, policy=config.eviction)
    return Engine(config, model, load_tokenizer(config.model), cache)
