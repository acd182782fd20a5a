"""A Llama-family decoder (Llama, Mistral, Qwen2, Qwen3, SmolLM) whose keys and values live in paged blocks.

One forward pass takes a `ForwardBatch` of prefill chunks and decodes, writes their KV into the blocks, and
returns logits for the rows asked for. The arithmetic is in `kernels`; here is only the order of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import ops
from replica.batch import ForwardBatch, IntArray
from replica.model_config import ModelConfig, rope_tables
from replica.model_loader import Layer, Loader, WeightSource
from replica.parallel.shard import Collectives


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer: layers[i] = (k, v), each [num_blocks, block_size, Hkv, D]."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    num_blocks: int
    block_size: int


@dataclass(frozen=True)
class _Step:
    """What all layers share in one pass. The first `decodes` rows are one-token sequences."""

    slots: Tensor
    cos: Tensor
    sin: Tensor
    decodes: int
    decode_plans: dict[int | None, Any]
    prefill_plans: dict[int | None, Any]


class Model:
    """Weights on one device, and the KV blocks they fill. Not thread-safe: one engine drives it.

    With `others`, it is one rank of several that compute a model together: it has the weights and the KV of
    its own heads, and its `config` tells of no others. `forward` gives logits of the whole vocabulary.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        others: Collectives | None = None,
    ) -> None:
        self.config = config if others is None else others.shard.local(config)
        self.dtype = dtype
        self.device = device
        self.kernels = ops.select(device, dtype)
        self.kv_cache: KVCache | None = None
        self._windows = {config.window_of(layer) for layer in range(config.num_layers)}
        self._scale = config.head_dim**-0.5
        with torch.inference_mode():
            self._load(Loader(config, weights, self.kernels, dtype, device, others))

    def _load(self, load: Loader) -> None:
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
        shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_dim)
        layers = tuple((self._zeros(shape), self._zeros(shape)) for _ in range(self.config.num_layers))
        self.kv_cache = KVCache(layers, num_blocks, block_size)

    def copy_blocks(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """For each (src block, dst block, num_tokens): copy the first tokens of all layers, in order."""
        with torch.inference_mode():
            for src, dst, num_tokens in copies:
                self.kernels.block_copy(self._kv().layers, src, dst, num_tokens)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Write the new tokens' KV and return logits [len(batch.logit_rows), vocab_size]."""
        batch = batch.decodes_first()
        with torch.inference_mode():
            step = self._step(batch)
            x = self._embedding[self._ints(batch.token_ids)]
            for index, (layer, (k_cache, v_cache)) in enumerate(
                zip(self._layers, self._kv().layers, strict=True)
            ):
                x = x + self._attention(index, layer, x, k_cache, v_cache, step)
                x = x + self._mlp(layer, x)
            wanted = x[self._ints(batch.logit_rows)]
            return self._head(self.kernels.rms_norm(wanted, self._norm, self.config.rms_eps))

    def close(self) -> None:
        """Nothing outlives the object: there is no other process."""

    def _step(self, batch: ForwardBatch) -> _Step:
        decodes = int((batch.query_lens == 1).sum())
        positions = self._ints(batch.positions)
        return _Step(
            slots=self._ints(batch.slots),
            cos=self._cos[positions],
            sin=self._sin[positions],
            decodes=decodes,
            decode_plans=self._plans(batch, slice(0, decodes)),
            prefill_plans=self._plans(batch, slice(decodes, None)),
        )

    def _plans(self, batch: ForwardBatch, part: slice) -> dict[int | None, Any]:
        if not len(batch.query_lens[part]):
            return {}
        seqs = ops.PagedSeqs(
            query_lens=tuple(batch.query_lens[part].tolist()),
            context_lens=tuple(batch.context_lens[part].tolist()),
            block_tables=torch.from_numpy(batch.block_tables[part].astype(np.int64)),
            block_size=self._kv().block_size,
        )
        return {window: self.kernels.plan(seqs, window) for window in self._windows}

    def _attention(
        self, index: int, layer: Layer, x: Tensor, k_cache: Tensor, v_cache: Tensor, step: _Step
    ) -> Tensor:
        config, kernels = self.config, self.kernels
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(kernels.rms_norm(x, layer.attn_norm, config.rms_eps))
        qk, v = qkv.view(len(x), -1, config.head_dim).split((heads + kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(qk[:, :heads], layer.q_norm, config.rms_eps)
            qk = torch.cat((q, kernels.rms_norm(qk[:, heads:], layer.k_norm, config.rms_eps)), dim=1)
        q, k = kernels.rope(qk, step.cos, step.sin).split((heads, kv_heads), dim=1)
        kernels.kv_write(k, v, k_cache, v_cache, step.slots)
        return layer.out(self._attend(config.window_of(index), q, k_cache, v_cache, step).flatten(1))

    def _attend(self, window: int | None, q: Tensor, k_cache: Tensor, v_cache: Tensor, step: _Step) -> Tensor:
        parts = []
        if step.decode_plans:
            plan = step.decode_plans[window]
            parts.append(self.kernels.paged_decode(q[: step.decodes], k_cache, v_cache, plan, self._scale))
        if step.prefill_plans:
            plan = step.prefill_plans[window]
            parts.append(self.kernels.paged_prefill(q[step.decodes :], k_cache, v_cache, plan, self._scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        hidden = self.kernels.rms_norm(x, layer.mlp_norm, self.config.rms_eps)
        return layer.down(self.kernels.silu_mul(layer.gate_up(hidden)))

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # numpy asks the system for zeroed pages, which take no memory before they are written;
        # torch.zeros writes them all.
        nbytes = math.prod(shape) * self.dtype.itemsize
        return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8)).view(self.dtype).view(shape)

    def _ints(self, values: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self.device)

    def _kv(self) -> KVCache:
        if self.kv_cache is None:
            raise RuntimeError("allocate_kv() comes before the first forward pass")
        return self.kv_cache
