"""The operations in plain torch, written to be read: the truth other implementations are measured against.

Any dtype and device. Shapes are those of `kernels.ops.Kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.grouped import Weight, dense
from kernels.ops import Linear, PagedSeqs


def pack_linear(weight: Weight, bias: Tensor | None) -> Linear:
    """x @ weight.T + bias."""
    plain = dense(weight)

    def apply(x: Tensor) -> Tensor:
        y = x @ plain.T
        return y if bias is None else y + bias

    return apply


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm (Zhang and Sennrich 2019)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021), the "halves" pairing of Hugging Face: (i, i + D/2) is one pair."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's elementwise part (Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Scatter keys and values into their slots."""
    k_cache.flatten(0, 1)[slots] = k
    v_cache.flatten(0, 1)[slots] = v


@dataclass(frozen=True)
class Plan:
    """Nothing to prepare: the sequences and the window as they came."""

    seqs: PagedSeqs
    window: int | None


def plan(seqs: PagedSeqs, window: int | None) -> Plan:
    """Keep the arguments."""
    return Plan(seqs, window)


def paged_prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, scale: float) -> Tensor:
    """Softmax attention, sequence by sequence and with the full score matrix."""
    out, row = torch.empty_like(q), 0
    seqs = plan.seqs
    for index, (new, context) in enumerate(zip(seqs.query_lens, seqs.context_lens, strict=True)):
        slots = _slots(seqs, index, context).to(q.device)
        keys, values = k_cache.flatten(0, 1)[slots], v_cache.flatten(0, 1)[slots]
        out[row : row + new] = _attend(q[row : row + new], keys, values, plan.window, scale)
        row += new
    return out


def paged_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, scale: float) -> Tensor:
    """A decode is a prefill of one token."""
    return paged_prefill(q, k_cache, v_cache, plan, scale)


def block_copy(caches: Sequence[tuple[Tensor, Tensor]], src: int, dst: int, num_tokens: int) -> None:
    """Copy the head of one block to another, layer by layer."""
    for pair in caches:
        for cache in pair:
            cache[dst, :num_tokens] = cache[src, :num_tokens]


def _slots(seqs: PagedSeqs, index: int, context: int) -> Tensor:
    position = torch.arange(context)
    blocks = seqs.block_tables[index].long()[position // seqs.block_size]
    return blocks * seqs.block_size + position % seqs.block_size


def _attend(q: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float) -> Tensor:
    """q[n, Hq, D] against keys, values [L, Hkv, D], whose last n tokens are q's own."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    query_at = torch.arange(len(keys) - len(q), len(keys), device=q.device)[:, None]
    key_at = torch.arange(len(keys), device=q.device)[None]
    hidden = key_at > query_at
    if window is not None:
        hidden = hidden | (key_at <= query_at - window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
