"""A Llama-family decoder (Llama, Mistral, Qwen2, Qwen3, SmolLM) whose keys and values live in paged blocks.

One forward pass takes a `ForwardBatch` of prefill chunks and decodes, writes their KV into the blocks, and
returns logits for the rows asked for. The arithmetic is in `kernels`; here is only the order of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from kernels import ops
from kernels.grouped import GroupedWeight, Weight, stack
from replica.batch import ForwardBatch
from replica.block_copier import BlockCopier, streams_of
from replica.decode_graphs import DecodeGraphs, Recorder
from replica.errors import CorruptModel
from replica.model_config import ModelConfig, rope_tables
from replica.pass_inputs import Pass, PassInputs

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
class _Layer:
    attn_norm: Tensor
    qkv: ops.Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: ops.Linear
    mlp_norm: Tensor
    gate_up: ops.Linear
    down: ops.Linear


@dataclass(frozen=True)
class KVCache:
    """Keys and values of each layer: layers[i] = (k, v), both [num_blocks + 1, block_size, Hkv, D].

    The last block is spare: rows that only fill up a batch write there. `prepared` is what the kernels need
    to know of the layers to copy blocks.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    num_blocks: int
    block_size: int
    prepared: Any


class Model:
    """Weights on one device, and the KV blocks they fill. Not thread-safe: one engine drives it."""

    def __init__(
        self, config: ModelConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.kernels = ops.select(device, dtype)
        self.kv_cache: KVCache | None = None
        self._inputs: PassInputs | None = None
        self._graphs: DecodeGraphs | None = None
        self._copier: BlockCopier | None = None
        self._windows = {config.window_of(layer) for layer in range(config.num_layers)}
        self._scale = config.head_dim**-0.5
        with torch.inference_mode():
            self._load(_Loader(config, weights, self.kernels, dtype, device))

    def _load(self, load: _Loader) -> None:
        cos, sin = rope_tables(self.config, self.dtype)
        self._cos, self._sin = cos.to(self.device), sin.to(self.device)
        self._embedding = load.tensor(
            "model.embed_tokens.weight", self.config.vocab_size, self.config.hidden_size
        )
        self._layers = [load.layer(index) for index in range(self.config.num_layers)]
        self._norm = load.tensor("model.norm.weight", self.config.hidden_size)
        self._head = load.head()

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make room for num_blocks blocks of block_size tokens; replaces what was there."""
        config = self.config
        self.kv_cache = self._inputs = self._graphs = self._copier = None  # what was there makes room first
        shape = (num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
        layers = tuple((self._zeros(shape), self._zeros(shape)) for _ in range(config.num_layers))
        self.kv_cache = KVCache(layers, num_blocks, block_size, self.kernels.layers_of(layers))
        group = config.num_heads // config.num_kv_heads
        attention = ops.AttentionShape(group, config.head_dim, self.dtype, self.device)
        self._inputs = PassInputs(self.kernels, self._windows, attention, block_size)
        copy = partial(self.kernels.block_copies, self.kv_cache.prepared)
        self._copier = BlockCopier(copy, streams_of(self.device), block_size)

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one block in all layers."""
        return self.config.kv_bytes_per_token(self.dtype.itemsize) * block_size

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """For each (src block, dst block, num_tokens): copy the first tokens of all layers, in order.

        After the passes so far, before the next one.
        """
        assert self._copier is not None, "allocate_kv() comes before the first copy"
        with torch.inference_mode():
            self._copier.copy(copies)

    def forward(self, batch: ForwardBatch, drawn: Tensor | None = None) -> Tensor:
        """Write the new tokens' KV and return logits [len(batch.logit_rows), vocab_size].

        `drawn`: int64[n], what the step before has drawn, for the token ids that refer to it.
        """
        assert self._inputs is not None and self._copier is not None, (
            "allocate_kv() comes before the first forward pass"
        )
        batch = batch.decodes_first()
        with torch.inference_mode(), self._copier.computing(batch):
            found = None if self._graphs is None else self._graphs.run(batch, drawn)
            return self._head(self.hidden(self._inputs.build(batch, drawn)) if found is None else found)

    def record_decodes(self, most: int, longest: int, recorder: Recorder) -> None:
        """Record batches of up to `most` decodes, with contexts of `longest` tokens at most, to be replayed.

        Only for kernels with `STATIC_PLANS`, and after `allocate_kv`, which forgets the recordings.
        """
        assert self._inputs is not None and self.kernels.STATIC_PLANS
        spare = self._kv().num_blocks * self._kv().block_size
        with torch.inference_mode():
            out = torch.empty((most, self.config.hidden_size), dtype=self.dtype, device=self.device)
            self._graphs = DecodeGraphs(self.hidden, self._inputs, out, longest, spare, recorder)

    def hidden(self, step: Pass) -> Tensor:
        """The last layer's normed output [R, hidden_size] for the rows asked for."""
        eps, layers = self.config.rms_eps, self._layers
        norms = [layer.attn_norm for layer in layers[1:]] + [self._norm]
        cos, sin = self._cos[step.positions], self._sin[step.positions]
        x = self._embedding[step.ids]
        normed = self.kernels.rms_norm(x, layers[0].attn_norm, eps)
        for index, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
            attended = self._attention(index, layer, normed, cos, sin, step)
            normed, x = self.kernels.add_rms_norm(attended, x, layer.mlp_norm, eps)
            y = layer.down(self.kernels.silu_mul(layer.gate_up(normed)))
            if index == len(layers) - 1 and step.rows is not None:
                x, y = x[step.rows], y[step.rows]
            normed, x = self.kernels.add_rms_norm(y, x, norm, eps)
        return normed

    def _attention(
        self, index: int, layer: _Layer, normed: Tensor, cos: Tensor, sin: Tensor, step: Pass
    ) -> Tensor:
        config, kernels = self.config, self.kernels
        caches = self._kv().layers[index]
        qkv = layer.qkv(normed).view(len(normed), -1, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            kv_heads = caches[0].shape[2]
            q, k = qkv[:, : -2 * kv_heads], qkv[:, -2 * kv_heads : -kv_heads]
            q.copy_(kernels.rms_norm(q, layer.q_norm, config.rms_eps))
            k.copy_(kernels.rms_norm(k, layer.k_norm, config.rms_eps))
        q = kernels.rope_kv_write(qkv, cos, sin, *caches, step.slots)
        return layer.out(self._attend(config.window_of(index), q, caches, step).flatten(1))

    def _attend(self, window: int | None, q: Tensor, caches: tuple[Tensor, Tensor], step: Pass) -> Tensor:
        parts = []
        if step.decode_plans:
            plan = step.decode_plans[window]
            parts.append(self.kernels.paged_decode(q[: step.decodes], *caches, plan, self._scale))
        if step.prefill_plans:
            plan = step.prefill_plans[window]
            parts.append(self.kernels.paged_prefill(q[step.decodes :], *caches, plan, self._scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # numpy asks the system for zeroed pages, which take no memory before they are written;
        # torch.zeros writes them all.
        nbytes = math.prod(shape) * self.dtype.itemsize
        return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8)).view(self.dtype).view(shape)

    def _kv(self) -> KVCache:
        if self.kv_cache is None:
            raise RuntimeError("allocate_kv() comes before the first forward pass")
        return self.kv_cache


@dataclass(frozen=True)
class _Loader:
    """Takes tensors from a source, checks their shapes, fuses and packs them."""

    config: ModelConfig
    weights: WeightSource
    kernels: ops.Kernels
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str, *shape: int) -> Tensor:
        found = self.optional(name, *shape)
        if found is None:
            raise CorruptModel(f"the model has no tensor {name!r}")
        return found

    def optional(self, name: str, *shape: int) -> Tensor | None:
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

    def layer(self, index: int) -> _Layer:
        config, at = self.config, f"model.layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"
        return _Layer(
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
