"""The fast path for float32 on a CPU: compiled kernels where torch has none that fits, else torch.

Importing this module compiles the kernels, or loads them from numba's cache. It fails with an `ImportError`
where numba or torch's OpenMP is missing; `kernels.cpu_torch` then does everything.

- Quantized weights are multiplied as they are (`grouped_linear`); dense ones go to MKL's packed product.
- Attention of decodes is one call for all sequences (`decode_attention`); that of prefill is torch's.
- Norm, rotary embedding and KV write are one call each (`token_rows`).

A row's result does not depend on how many rows it is computed with, bit for bit, except in prefill attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kernels import cpu_torch, decode_attention, grouped_linear
from kernels.cpu_torch import STATIC_PLANS, block_copies, layers_of, plan_arrays, silu_mul
from kernels.grouped import GroupedWeight, Weight
from kernels.ops import Linear, PagedSeqs
from kernels.token_rows import add_rms_norm, rms_norm, rope_kv_write

__all__ = [
    "STATIC_PLANS",
    "add_rms_norm",
    "block_copies",
    "layers_of",
    "pack_linear",
    "paged_decode",
    "paged_prefill",
    "plan",
    "plan_arrays",
    "rms_norm",
    "rope_kv_write",
    "silu_mul",
]


def pack_linear(weight: Weight, bias: Tensor | None) -> Linear:
    """x @ weight.T + bias; a quantized weight stays quantized."""
    if isinstance(weight, GroupedWeight) and weight.dtype == torch.float32:
        return grouped_linear.pack(weight, bias)
    return cpu_torch.pack_linear(weight, bias)


@dataclass(frozen=True)
class Plan:
    """The sequences as arrays for decode, and as pieces for prefill (made when first asked for)."""

    seqs: PagedSeqs
    window: int | None
    tables: Tensor
    contexts: Tensor

    @cached_property
    def pieces(self) -> list[cpu_torch.SeqPieces]:
        """What torch's attention needs to know."""
        return cpu_torch.plan(self.seqs, self.window)


def plan(seqs: PagedSeqs, window: int | None, arrays: Sequence[Tensor] = ()) -> Plan:
    """Block tables and context lengths, ready to be read by compiled code."""
    contexts = torch.tensor(seqs.context_lens, dtype=torch.int64)
    return Plan(seqs, window, seqs.block_tables.to(torch.int64).contiguous(), contexts)


def paged_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, scale: float) -> Tensor:
    """One call for all sequences."""
    window = max(plan.seqs.context_lens) if plan.window is None else plan.window
    return decode_attention.attend(q, k_cache, v_cache, plan.tables, plan.contexts, window, scale)


def paged_prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, scale: float) -> Tensor:
    """torch's fused attention, sequence by sequence."""
    return cpu_torch.paged_prefill(q, k_cache, v_cache, plan.pieces, scale)
