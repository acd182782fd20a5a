"""A Llama-family decoder (Llama, Mistral, Qwen2, Qwen3, SmolLM) whose keys and values live in paged blocks.

One forward pass takes a `ForwardBatch` of prefill chunks and decodes, writes their KV into the blocks, and
returns logits for the rows asked for. The arithmetic is in `kernels`; here is only the order of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import ops
from replica.batch import ForwardBatch
from replica.block_copier import BlockCopier, streams_of
from replica.decode_graphs import DecodeGraphs, Recorder, recorder_of
from replica.model_config import ModelConfig, rope_tables
from replica.model_loader import Layer, Loader, WeightSource
from replica.parallel.shard import Collectives
from replica.pass_inputs import Pass, PassInputs


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
        self._inputs: PassInputs | None = None
        self._graphs: DecodeGraphs | None = None
        self._copier: BlockCopier | None = None
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

    def record_decodes(self, most: int, longest: int, recorder: Recorder | None = None) -> None:
        """Record batches of up to `most` decodes, with contexts of `longest` tokens at most, to be replayed.

        Only for kernels with `STATIC_PLANS`, and after `allocate_kv`, which forgets the recordings.
        """
        assert self._inputs is not None and self.kernels.STATIC_PLANS
        spare = self._kv().num_blocks * self._kv().block_size
        with torch.inference_mode():
            out = torch.empty((most, self.config.hidden_size), dtype=self.dtype, device=self.device)
            recorder = recorder_of(self.device) if recorder is None else recorder
            self._graphs = DecodeGraphs(self.hidden, self._inputs, out, longest, spare, recorder)

    def close(self) -> None:
        """Nothing outlives the object: there is no other process."""

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
        self, index: int, layer: Layer, normed: Tensor, cos: Tensor, sin: Tensor, step: Pass
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
