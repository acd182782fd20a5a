"""Models by name or path: loading them, their tokenizers and their digests.

A model is `random:tiny`, a named model that fetches itself (`registry`), a .gguf file, or a Hugging Face
folder.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from replica import pull, random_model, registry
from replica.errors import ModelNotFound
from replica.gguf_file import GgufFile
from replica.model import Model
from replica.model_config import ModelConfig
from replica.model_loader import WeightSource
from replica.parallel.shard import Collectives, check_split
from replica.random_names import TINY
from replica.tokenizer import Tokenizer, Vocabulary
from replica.tokenizer_build import gguf_vocabulary, hf_vocabulary, tiny_vocabulary
from replica.weights_gguf import GgufWeights, gguf_config
from replica.weights_hf import HfWeights, hf_config, weight_files


def load_model(
    name_or_path: str,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    others: Collectives | None = None,
) -> tuple[Model, ModelConfig]:
    """The model, ready for `allocate_kv`, and its shape. A named model that is not here yet is fetched.

    With `others`, the model is this rank's part; the shape is the whole one's all the same. Its digest, which
    takes reading all files, has only the first rank.

    Raises a `ModelError` that says what is wrong, `ConfigError` for a model that cannot be spread like this.
    """
    config, weights = _open_weights(name_or_path)
    if others is None or others.shard.rank == 0:
        config = replace(config, digest=model_digest(name_or_path))
    if others is not None:
        check_split(config, others.shard.size)
    return Model(config, weights, dtype, torch.device(device), others), config


def load_config(name_or_path: str) -> ModelConfig:
    """The model's shape and digest without its weights in memory. Raises a `ModelError`."""
    if name_or_path == TINY:
        config = random_model.tiny_config()
    else:
        path = resolve(name_or_path)
        config = hf_config(path) if path.is_dir() else gguf_config(GgufFile(path))
    return replace(config, digest=model_digest(name_or_path))


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """The tokenizer that belongs to a model; needs no weights in memory. Raises a `ModelError`."""
    vocabulary, context = _open_vocabulary(name_or_path)
    return Tokenizer(vocabulary, context, model_digest(name_or_path))


def model_digest(name_or_path: str) -> str:
    """Hex SHA-256 that names the exact weights and their configuration. Raises a `ModelError`."""
    if name_or_path == TINY:
        return random_model.tiny_digest()
    if name_or_path in registry.NAMED:
        return registry.NAMED[name_or_path].sha256
    path = resolve(name_or_path)
    files = [path] if path.is_file() else [path / name for name in ("config.json", *weight_files(path))]
    return _digest(tuple((file, *_stamp(file)) for file in files))


def resolve(name_or_path: str) -> Path:
    """The .gguf file or the folder behind a name or path, fetched if need be. Raises `ModelNotFound`."""
    if name_or_path in registry.NAMED:
        return pull.ensure(registry.NAMED[name_or_path])
    path = Path(name_or_path).expanduser()
    if path.is_dir() and (path / "config.json").exists():
        return path
    if path.is_file():
        return path
    names = ", ".join([*registry.NAMED, TINY])
    raise ModelNotFound(
        f"no model {name_or_path!r}: known names are {names}; otherwise give a .gguf file "
        "or a folder with config.json, tokenizer.json and safetensors"
    )


def _open_weights(name_or_path: str) -> tuple[ModelConfig, WeightSource]:
    if name_or_path == TINY:
        config = random_model.tiny_config()
        return config, random_model.RandomWeights(config)
    path = resolve(name_or_path)
    if path.is_dir():
        return hf_config(path), HfWeights(path)
    file = GgufFile(path)
    config = gguf_config(file)
    return config, GgufWeights(file, config)


def _open_vocabulary(name_or_path: str) -> tuple[Vocabulary, int]:
    if name_or_path == TINY:
        return tiny_vocabulary(), random_model.tiny_config().context_length
    path = resolve(name_or_path)
    if path.is_dir():
        return hf_vocabulary(path), hf_config(path).context_length
    file = GgufFile(path)
    return gguf_vocabulary(file), gguf_config(file).context_length


def _stamp(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except FileNotFoundError as error:
        raise ModelNotFound(f"no file {file}") from error
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=16)
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    """One file's own SHA-256, or the SHA-256 over those of several. Cached until a size or time changes."""
    hashes = [pull.sha256_of(file) for file, _, _ in files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
