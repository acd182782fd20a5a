"""Models by name or path: loading them, their tokenizers and their digests.

A model is `random:tiny`, a named model that can be fetched, a .gguf file, or a Hugging Face folder.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from replica import random_model
from replica.errors import ModelNotFound
from replica.model import Model
from replica.model_config import ModelConfig
from replica.tokenizer import Tokenizer
from replica.tokenizer_build import tiny_vocabulary


def load_model(
    name_or_path: str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[Model, ModelConfig]:
    """The model, ready for `allocate_kv`. Raises a `ModelError` that says what is wrong."""
    if name_or_path == random_model.TINY:
        config = replace(random_model.tiny_config(), digest=random_model.tiny_digest())
        return Model(config, random_model.RandomWeights(config), dtype, torch.device(device)), config
    raise ModelNotFound(f"no model {name_or_path!r}")


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """The tokenizer that belongs to a model; needs no weights in memory."""
    if name_or_path == random_model.TINY:
        context = random_model.tiny_config().context_length
        return Tokenizer(tiny_vocabulary(), context, random_model.tiny_digest())
    raise ModelNotFound(f"no model {name_or_path!r}")


def model_digest(name_or_path: str) -> str:
    """Hex SHA-256 that names the exact weights."""
    if name_or_path == random_model.TINY:
        return random_model.tiny_digest()
    raise ModelNotFound(f"no model {name_or_path!r}")
