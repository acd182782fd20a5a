"""From named tensors to a decoder's weights: shapes checked, layers of one input fused, matrices packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from kernels import ops
from kernels.grouped import GroupedWeight, Weight, stack
from replica.errors import CorruptModel
from replica.model_config import ModelConfig

_W = TypeVar("_W", Tensor, GroupedWeight)


class WeightSource(Protocol):
    """Tensors by their Hugging Face names ("model.layers.0.self_attn.q_proj.weight")."""

    def get(self, name: str) -> Tensor | None:
        """The tensor as [out, in] (or [n]), or None when the model has no such tensor."""


@runtime_checkable
class QuantizedSource(WeightSource, Protocol):
    """A source that has matrices still quantized, too."""

    def grouped(self, name: str) -> GroupedWeight | None:
        """The matrix [out, in], or None when it has it only as a tensor, or not at all."""


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer, ready to be called."""

    attn_norm: Tensor
    qkv: ops.Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: ops.Linear
    mlp_norm: Tensor
    gate_up: ops.Linear
    down: ops.Linear


@dataclass(frozen=True)
class Loader:
    """Takes tensors from a source, checks their shapes, fuses and packs them."""

    config: ModelConfig
    weights: WeightSource
    kernels: ops.Kernels
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name and shape. Raises `CorruptModel`."""
        found = self.optional(name, *shape)
        if found is None:
            raise CorruptModel(f"the model has no tensor {name!r}")
        return found

    def optional(self, name: str, *shape: int) -> Tensor | None:
        """The same, or None when the model has no such tensor."""
        found = self.weights.get(name)
        return None if found is None else self._fitting(name, found, shape).to(self.device, self.dtype)

    def matrix(self, name: str, *shape: int) -> Weight:
        """A weight of a linear layer: quantized if the source has it so."""
        found = self.weights.grouped(name) if isinstance(self.weights, QuantizedSource) else None
        if found is None:
            return self.tensor(name, *shape)
        return self._fitting(name, found, shape).to(self.device, self.dtype)

    def _fitting(self, name: str, found: _W, shape: tuple[int, ...]) -> _W:
        if tuple(found.shape) != shape:
            raise CorruptModel(
                f"tensor {name!r} has shape {tuple(found.shape)}, the configuration says {shape}"
            )
        parts = (found.scale, found.offset) if isinstance(found, GroupedWeight) else (found,)
        if not all(bool(torch.isfinite(limit)) for part in parts for limit in part.aminmax()):
            raise CorruptModel(f"tensor {name!r} holds NaN or infinite numbers")
        return found

    def fused(self, names: list[str], outs: list[int], fan_in: int) -> ops.Linear:
        """Several linear layers of one input as one."""
        weights = [self.matrix(f"{name}.weight", out, fan_in) for name, out in zip(names, outs, strict=True)]
        biases = [self.optional(f"{name}.bias", out) for name, out in zip(names, outs, strict=True)]
        bias = None
        if any(b is not None for b in biases):
            filled = [torch.zeros(out) if b is None else b for b, out in zip(biases, outs, strict=True)]
            bias = torch.cat([b.to(self.device, self.dtype) for b in filled])
        return self.kernels.pack_linear(stack(weights), bias)

    def layer(self, index: int) -> Layer:
        """All weights of one decoder layer."""
        config, at = self.config, f"model.layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"
        return Layer(
            attn_norm=self.tensor(f"{at}.input_layernorm.weight", hidden),
            qkv=self.fused([f"{attn}.{p}_proj" for p in "qkv"], [q, kv, kv], hidden),
            q_norm=self.optional(f"{attn}.q_norm.weight", config.head_dim),
            k_norm=self.optional(f"{attn}.k_norm.weight", config.head_dim),
            out=self.fused([f"{attn}.o_proj"], [hidden], q),
            mlp_norm=self.tensor(f"{at}.post_attention_layernorm.weight", hidden),
            gate_up=self.fused([f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], hidden),
            down=self.fused([f"{mlp}.down_proj"], [hidden], inner),
        )

    def head(self) -> ops.Linear:
        """The output projection; the embedding itself when the model has none of its own."""
        own = self.weights.get("lm_head.weight") is not None
        name = "lm_head.weight" if own else "model.embed_tokens.weight"
        return self.kernels.pack_linear(
            self.matrix(name, self.config.vocab_size, self.config.hidden_size), None
        )
