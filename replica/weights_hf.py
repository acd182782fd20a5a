"""Configuration and weights of a Llama-family model in a Hugging Face folder (config.json + safetensors)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from replica.errors import CorruptModel, ModelNotFound, UnsupportedModel
from replica.model_config import ModelConfig, RopeConfig

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `ModelNotFound` or `CorruptModel`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFound(f"no file {path}") from error
    except (OSError, ValueError) as error:
        raise CorruptModel(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptModel(f"{path} holds no JSON object")
    return value


def hf_config(folder: Path, digest: str = "") -> ModelConfig:
    """The decoder's shape from config.json. Raises `UnsupportedModel` or `CorruptModel`."""
    raw = read_json(folder / "config.json")
    arch = raw.get("model_type")
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(f"{folder}: model_type {arch!r}; supported: {', '.join(ARCHITECTURES)}")
    if raw.get("quantization_config"):
        raise UnsupportedModel(f"{folder}: quantized safetensors are not supported, use GGUF")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"{folder}: activation {raw['hidden_act']!r}, only silu")
    count = _Counts(folder, raw)
    heads, hidden, layers = (count(k) for k in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    context = count("max_position_embeddings")
    window, window_layers = _window(raw, arch, layers)
    return ModelConfig(
        arch=arch,
        vocab_size=count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=count("num_key_value_heads", heads),
        head_dim=count("head_dim", hidden // heads),
        context_length=context,
        rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(folder, raw, context),
        sliding_window=window,
        window_layers=window_layers,
        digest=digest,
    )


class HfWeights:
    """A `WeightSource` over a folder's safetensors, one file or several with an index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tied = bool(read_json(folder / "config.json").get("tie_word_embeddings", False))
        self._files = {file: _open(folder / file) for file in weight_files(folder)}
        self._where = {name: file for file, handle in self._files.items() for name in handle.keys()}  # noqa: SIM118
        index = folder / "model.safetensors.index.json"
        if index.exists() and (missing := read_json(index)["weight_map"].keys() - self._where.keys()):
            raise CorruptModel(f"{folder}: the index lists {min(missing)!r}, no file has it")
        if not self._tied and "lm_head.weight" not in self._where:
            raise CorruptModel(f"{folder}: no lm_head.weight, and the embeddings are not tied")

    def get(self, name: str) -> Tensor | None:
        """The tensor in its stored dtype, or None."""
        file = self._file(name)
        return None if file is None else self._known(name, file.get_tensor(name))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The tensor's shape, or None."""
        file = self._file(name)
        return None if file is None else tuple(file.get_slice(name).get_shape())

    def part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Rows (and columns) of a tensor, the only ones that are read."""
        return self._known(name, self._file(name).get_slice(name)[part])

    def _file(self, name: str) -> Any:
        """The open file that has the tensor, or None."""
        if self._tied and name == "lm_head.weight":
            return None
        where = self._where.get(name)
        return None if where is None else self._files[where]

    def _known(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype not in _DTYPES:
            raise UnsupportedModel(f"{self._folder}: tensor {name!r} has dtype {tensor.dtype}")
        return tensor


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files that hold the weights, sorted."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        if not (folder / "model.safetensors").exists():
            raise ModelNotFound(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
        return ["model.safetensors"]
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise CorruptModel(f"{index} has no weight_map")
    files = sorted(set(places.values()))
    if bad := [file for file in files if Path(file).name != file]:
        raise CorruptModel(f"{index} points outside its folder: {bad[0]!r}")
    return files


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ModelNotFound(f"no file {path}") from error
    except (SafetensorError, OSError) as error:
        raise CorruptModel(f"{path} is truncated or damaged: {error}") from error


def _window(raw: dict[str, Any], arch: str, layers: int) -> tuple[int | None, frozenset[int] | None]:
    """Sliding window in tokens and the layers it holds for (None = all)."""
    window = raw.get("sliding_window")
    # Llama configurations have no window; Qwen's name one that only counts when switched on.
    if (
        not window
        or arch == "llama"
        or (arch.startswith("qwen") and not raw.get("use_sliding_window", False))
    ):
        return None, None
    if kinds := raw.get("layer_types"):
        return int(window), frozenset(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    if arch.startswith("qwen"):
        return int(window), frozenset(range(int(raw.get("max_window_layers", layers)), layers))
    return int(window), None


def _rope(folder: Path, raw: dict[str, Any], context: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel(f"{folder}: rotary embedding of only part of a head")
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn"):
        raise UnsupportedModel(f"{folder}: rope scaling {kind!r}")
    original = int(scaling.get("original_max_position_embeddings") or context)
    numbers = {
        key: float(scaling[key])
        for key in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        if scaling.get(key) is not None
    }
    attention = scaling.get("attention_factor")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(scaling.get("factor") or context / original),
        original_context=original,
        attention_factor=None if attention is None else float(attention),
        mscale=float(scaling.get("mscale") or 0.0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
        truncate=bool(scaling.get("truncate", True)),
        low_freq_factor=numbers.get("low_freq_factor", 1.0),
        high_freq_factor=numbers.get("high_freq_factor", 4.0),
        beta_fast=numbers.get("beta_fast", 32.0),
        beta_slow=numbers.get("beta_slow", 1.0),
    )


class _Counts:
    """Positive integers out of config.json."""

    def __init__(self, folder: Path, raw: dict[str, Any]) -> None:
        self._folder = folder
        self._raw = raw

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self._raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CorruptModel(f"{self._folder}: config.json has {key} = {value!r}")
        return value
