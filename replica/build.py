"""Builds an engine from its settings: loads model and tokenizer, and has them assembled."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from replica.assemble import LoadedModel, assemble, settled, use_device
from replica.config import EngineConfig
from replica.engine import Engine
from replica.errors import ConfigError
from replica.memory import CudaMemory, gib
from replica.models import load_model, load_tokenizer
from replica.parallel.launch import ChildProcesses, Launch
from replica.parallel.model import start


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
    with ExitStack() as undo:
        undo.callback(model.close)  # or other ranks would stay until somebody collects it
        engine = assemble(config, model, load_tokenizer(config.model))
        undo.pop_all()
    return engine


def _load(config: EngineConfig, launch: Launch) -> LoadedModel:
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
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
