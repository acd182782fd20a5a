"""From named tensors to a decoder's weights: shapes checked, layers of one input fused, matrices packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from kernels import ops
from kernels.grouped import GROUP, GroupedWeight, Weight, stack
from replica.errors import ConfigError, CorruptModel
from replica.model_config import ModelConfig
from replica.parallel.shard import Collectives, Shard

_W = TypeVar("_W", Tensor, GroupedWeight)
Part = tuple[slice, ...]
"""Rows, or rows and columns, of a tensor; () is all of it."""


class WeightSource(Protocol):
    """Tensors by their Hugging Face names ("model.layers.0.self_attn.q_proj.weight")."""

    def get(self, name: str) -> Tensor | None:
        """The tensor as [out, in] (or [n]), or None when the model has no such tensor."""


@runtime_checkable
class QuantizedSource(WeightSource, Protocol):
    """A source that has matrices still quantized, too."""

    def grouped(self, name: str) -> GroupedWeight | None:
        """The matrix [out, in], or None when it has it only as a tensor, or not at all."""


@runtime_checkable
class SlicedSource(WeightSource, Protocol):
    """A source that can read a part of a tensor without the rest."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The whole tensor's shape, or None when the model has no such tensor."""

    def part(self, name: str, part: Part) -> Tensor:
        """Of a tensor that there is, these rows (and columns)."""


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
    """Takes tensors from a source, checks their shapes, fuses and packs them.

    With `others`, it takes this rank's part of the matrices, and joins the ranks' results. `config` is that
    of the whole model.
    """

    config: ModelConfig
    weights: WeightSource
    kernels: ops.Kernels
    dtype: torch.dtype
    device: torch.device
    others: Collectives | None = None

    @property
    def shard(self) -> Shard:
        """What this rank holds of the model; all of it when it is alone."""
        return Shard() if self.others is None else self.others.shard

    def tensor(self, name: str, *shape: int, part: Part = ()) -> Tensor:
        """The tensor of this name and shape, or a part of it. Raises `CorruptModel`."""
        found = self.optional(name, *shape, part=part)
        if found is None:
            raise CorruptModel(f"the model has no tensor {name!r}")
        return found

    def optional(self, name: str, *shape: int, part: Part = ()) -> Tensor | None:
        """The same, or None when the model has no such tensor."""
        found = self._read(name, shape, part)
        return None if found is None else _finite(name, found).to(self.device, self.dtype)

    def matrix(self, name: str, *shape: int, part: Part = ()) -> Weight:
        """A weight of a linear layer, or a part of it: quantized if the source has it so."""
        found = self.weights.grouped(name) if isinstance(self.weights, QuantizedSource) else None
        if found is None:
            return self.tensor(name, *shape, part=part)
        _require_shape(name, found.shape, shape)
        return _finite(name, self._cut(name, found, part)).to(self.device, self.dtype)

    def by_outputs(self, names: list[str], outs: list[int], fan_in: int, parts: list[slice]) -> ops.Linear:
        """Several linear layers of one input as one: of each, this rank's outputs."""
        each = list(zip(names, outs, parts, strict=True))
        weights = [self.matrix(f"{name}.weight", out, fan_in, part=self._part(p)) for name, out, p in each]
        biases = [self.optional(f"{name}.bias", out, part=self._part(p)) for name, out, p in each]
        bias = None
        if any(b is not None for b in biases):
            both = zip(weights, biases, strict=True)
            filled = [torch.zeros(weight.shape[0]) if b is None else b for weight, b in both]
            bias = torch.cat([b.to(self.device, self.dtype) for b in filled])
        return self.kernels.pack_linear(stack(weights), bias)

    def by_inputs(self, name: str, out: int, fan_in: int, part: slice) -> ops.Linear:
        """A linear layer of this rank's inputs; the ranks' results are summed, with the bias once."""
        weight = self.matrix(f"{name}.weight", out, fan_in, part=self._part(slice(None), part))
        bias = self.optional(f"{name}.bias", out)
        others = self.others
        if others is None:
            return self.kernels.pack_linear(weight, bias)
        mine = self.kernels.pack_linear(weight, bias if self.shard.rank == 0 else None)
        return lambda x: others.sum(mine(x))

    def layer(self, index: int) -> Layer:
        """This rank's weights of one decoder layer."""
        config, at = self.config, f"model.layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        heads, kv_heads = self.shard.heads(config), self.shard.kv_heads(config)
        width = self.shard.inner(config)
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"
        qkv, gate_up = [f"{attn}.{p}_proj" for p in "qkv"], [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        return Layer(
            attn_norm=self.tensor(f"{at}.input_layernorm.weight", hidden),
            qkv=self.by_outputs(qkv, [q, kv, kv], hidden, [heads, kv_heads, kv_heads]),
            q_norm=self.optional(f"{attn}.q_norm.weight", config.head_dim),
            k_norm=self.optional(f"{attn}.k_norm.weight", config.head_dim),
            out=self.by_inputs(f"{attn}.o_proj", hidden, q, heads),
            mlp_norm=self.tensor(f"{at}.post_attention_layernorm.weight", hidden),
            gate_up=self.by_outputs(gate_up, [inner, inner], hidden, [width, width]),
            down=self.by_inputs(f"{mlp}.down_proj", hidden, inner, width),
        )

    def head(self) -> ops.Linear:
        """The output projection; the embedding itself when the model has none of its own."""
        name = "lm_head.weight" if self._has("lm_head.weight") else "model.embed_tokens.weight"
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        part = self._part(self.shard.vocabulary(self.config))
        mine = self.kernels.pack_linear(self.matrix(name, vocab, hidden, part=part), None)
        others = self.others
        return mine if others is None else lambda x: others.gather(mine(x), vocab)

    def _part(self, *part: slice) -> Part:
        return () if self.others is None else part

    def _has(self, name: str) -> bool:
        if isinstance(self.weights, SlicedSource):
            return self.weights.shape(name) is not None
        return self.weights.get(name) is not None

    def _read(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor | None:
        if part and isinstance(self.weights, SlicedSource):
            there = self.weights.shape(name)
            if there is None:
                return None
            _require_shape(name, there, shape)
            return self.weights.part(name, part)
        found = self.weights.get(name)
        if found is None:
            return None
        _require_shape(name, found.shape, shape)
        # A view would keep the whole tensor in memory.
        return found[part].clone() if part else found

    def _cut(self, name: str, weight: GroupedWeight, part: Part) -> GroupedWeight:
        if not part:
            return weight
        rows, columns = (*part, slice(None))[:2]
        if columns != slice(None) and (columns.start % GROUP or columns.stop % GROUP):
            raise ConfigError(
                f"tensor_parallel {self.shard.size} would cut tensor {name!r} at input {columns.start} or "
                f"{columns.stop}, inside one of the groups of {GROUP} that it is quantized in"
            )
        return weight.part(rows, columns)


def _require_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(found) != expected:
        raise CorruptModel(f"tensor {name!r} has shape {tuple(found)}, the configuration says {expected}")


def _finite(name: str, found: _W) -> _W:
    parts = (found.scale, found.offset) if isinstance(found, GroupedWeight) else (found,)
    if not all(bool(torch.isfinite(limit)) for part in parts for limit in part.aminmax()):
        raise CorruptModel(f"tensor {name!r} holds NaN or infinite numbers")
    return found
