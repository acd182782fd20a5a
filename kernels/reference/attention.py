"""Softmax attention over paged keys and values, sequence by sequence and with the full score matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import AttentionShape, IntArray, PagedSeqs

STATIC_PLANS = False


@dataclass(frozen=True)
class Plan:
    """Nothing to prepare: the sequences and the window as they came."""

    seqs: PagedSeqs
    window: int | None


def plan_arrays(seqs: PagedSeqs, shape: AttentionShape) -> tuple[IntArray, ...]:
    """None: plans are made of what the host knows."""
    return ()


def plan(seqs: PagedSeqs, window: int | None, arrays: Sequence[Tensor] = ()) -> Plan:
    """Keep the arguments."""
    return Plan(seqs, window)


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Plan,
    scale: float,
    *,
    softcap: float | None = None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention of q[T, Hq, D] over each sequence's cached context, whose last tokens q are.

    Args:
        softcap: scores become softcap * tanh(scores / softcap) before the softmax (Gemma 2).
        kv_scales: float[Hkv] each: what a cached key and value of a head is multiplied by (float8 caches).
    """
    out, row = torch.empty_like(q), 0
    seqs = plan.seqs
    for index, (new, context) in enumerate(zip(seqs.query_lens, seqs.context_lens, strict=True)):
        slots = _slots(seqs, index, context).to(q.device)
        keys, values = (cache.flatten(0, 1)[slots].to(q.dtype) for cache in (k_cache, v_cache))
        if kv_scales is not None:
            keys, values = (x * s[:, None].to(q) for x, s in zip((keys, values), kv_scales, strict=True))
        out[row : row + new] = _attend(q[row : row + new], keys, values, plan.window, scale, softcap)
        row += new
    return out


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Plan,
    scale: float,
    *,
    softcap: float | None = None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """A decode is a prefill of one token."""
    return paged_prefill(q, k_cache, v_cache, plan, scale, softcap=softcap, kv_scales=kv_scales)


def _slots(seqs: PagedSeqs, index: int, context: int) -> Tensor:
    position = torch.arange(context)
    blocks = seqs.block_tables[index].long()[position // seqs.block_size]
    return blocks * seqs.block_size + position % seqs.block_size


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float, softcap: float | None
) -> Tensor:
    """q[n, Hq, D] against keys, values [L, Hkv, D], whose last n tokens are q's own."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    query_at = torch.arange(len(keys) - len(q), len(keys), device=q.device)[:, None]
    key_at = torch.arange(len(keys), device=q.device)[None]
    hidden = key_at > query_at
    if window is not None:
        hidden = hidden | (key_at <= query_at - window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
