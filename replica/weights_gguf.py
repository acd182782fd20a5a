"""Configuration and weights of a Llama-family model in a GGUF file.

GGUF names are translated to Hugging Face names. For architecture "llama" the converter of llama.cpp reorders
the rows of the query and key projections so that rotary pairs are neighbours; that is undone here, because
the kernels pair (i, i + head_dim / 2).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from kernels.grouped import GroupedWeight
from replica.errors import CorruptModel, UnsupportedModel
from replica.gguf_file import GgufFile
from replica.model_config import ModelConfig, RopeConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def gguf_config(file: GgufFile, digest: str = "") -> ModelConfig:
    """The decoder's shape from metadata. Raises `UnsupportedModel` or `CorruptModel`."""
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(f"{file.path}: architecture {arch!r}; supported: {', '.join(ARCHITECTURES)}")
    if int(file.metadata.get("split.count", 1)) > 1:
        raise UnsupportedModel(f"{file.path} is one part of a split model: join it with gguf-split first")
    values = _Values(file, arch)
    heads, hidden = values.integer("attention.head_count"), values.integer("embedding_length")
    head_dim = values.integer("attention.key_length", hidden // heads)
    if values.integer("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"{file.path}: rotary embedding of only part of a head")
    if values.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{file.path}: values and keys of different length")
    if values.integer("expert_count", 0):
        raise UnsupportedModel(f"{file.path} is a mixture of experts")
    return ModelConfig(
        arch=arch,
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        intermediate_size=values.integer("feed_forward_length"),
        num_layers=values.integer("block_count"),
        num_heads=heads,
        num_kv_heads=values.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        context_length=values.integer("context_length"),
        rms_eps=values.number("attention.layer_norm_rms_epsilon", 1e-5),
        rope=_rope(file, values),
        sliding_window=values.integer("attention.sliding_window", 0) or None,
        digest=digest,
    )


class GgufWeights:
    """A `WeightSource` over a file. Tensors are read one at a time: the peak is one above the model."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config

    def get(self, name: str) -> Tensor | None:
        """The float32 tensor under its Hugging Face name, or None."""
        source = _source(name)
        array = self._file.tensor(source) if source else None
        if array is None:
            return None
        # The caller never writes, and torch warns about arrays it could not write to.
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        order = self._row_order(name, len(tensor))
        return tensor if order is None else tensor[order]

    def grouped(self, name: str) -> GroupedWeight | None:
        """The same matrix still quantized, or None when the file has it in another form."""
        source = _source(name)
        weight = self._file.grouped(source) if source else None
        if weight is None:
            return None
        order = self._row_order(name, len(weight.codes))
        return weight if order is None else weight.rows(order)

    def _row_order(self, name: str, rows: int) -> Tensor | None:
        """For a reordered projection: where row (head, half, pair) is among the rows (head, pair, half)."""
        if self._config.arch != "llama":
            return None
        heads = {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}
        for part, count in heads.items():
            if f".self_attn.{part}." in name:
                return torch.arange(rows).view(count, -1, 2).transpose(1, 2).flatten()
        return None


def _source(name: str) -> str | None:
    """A tensor's name in the file."""
    return _TOP.get(name) or _layer_name(name)


def _layer_name(name: str) -> str | None:
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _PARTS:
        return None
    return f"blk.{match[1]}.{_PARTS[match[2]]}.{match[3]}"


def _vocab_size(file: GgufFile) -> int:
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise CorruptModel(f"{file.path} has no token embedding")
    return info.shape[0]


def _rope(file: GgufFile, values: _Values) -> RopeConfig:
    theta = values.number("rope.freq_base", 10000.0)
    factors = file.tensor("rope_freqs.weight")
    if factors is not None:
        return RopeConfig(theta=theta, kind="factors", factors=tuple(map(float, factors)))
    kind = values.get("rope.scaling.type", "none")
    factor = values.number("rope.scaling.factor", values.number("rope.scale_linear", 1.0))
    if factor == 1.0 or kind == "none":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{file.path}: rope scaling {kind!r}")
    original = values.integer("rope.scaling.original_context_length", values.integer("context_length"))
    return RopeConfig(theta=theta, kind=kind, factor=factor, original_context=original)


class _Values:
    """Metadata under an architecture's prefix, with types checked."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self._file = file
        self._arch = arch

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"{self._arch}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CorruptModel(f"{self._file.path}: {self._arch}.{key} is {value!r}, not a count")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CorruptModel(f"{self._file.path}: {self._arch}.{key} is {value!r}, not a number")
        return float(value)
