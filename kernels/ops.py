"""The operations a decoder calls, as one protocol, and the choice of who implements them.

Every implementation is a module with these functions: `reference` is the truth (any dtype, float64 too),
`cpu` the fast path for float32 on a CPU, `cpu_torch` its part that needs nothing but torch, which stands in
where `cpu` cannot be imported, and `triton` what CUDA devices use. `WARMROUTE_KERNELS=reference` forces one
by name.

Shapes: T new tokens, S sequences, Hq query heads, Hkv key/value heads, D head dimension.
A KV cache of one layer is a pair of tensors [num_blocks, block_size, Hkv, D]; slot s is offset s %
block_size of block s // block_size.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.grouped import Weight

log = logging.getLogger(__name__)

IMPLEMENTATIONS = ("reference", "cpu", "cpu_torch", "triton")
# What serves where a package that compiles the kernels cannot be imported.
STAND_INS = {"cpu": "cpu_torch", "triton": "reference"}
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

Linear = Callable[[Tensor], Tensor]
IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True)
class PagedSeqs:
    """Which cached tokens each sequence attends to.

    Attributes:
        query_lens: new tokens of each sequence; their KV is already in the cache.
        context_lens: cached prefix plus new tokens.
        block_tables: int64[S, max_blocks] on the host; entries beyond a context are ignored.
        block_size: tokens a block holds.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: Tensor
    block_size: int


@dataclass(frozen=True)
class AttentionShape:
    """What a prefill kernel picks its tile by: query heads per KV head, head dimension, dtype, device."""

    group: int
    dim: int
    dtype: torch.dtype
    device: torch.device


class Kernels(Protocol):
    """What every implementation provides.

    `STATIC_PLANS` tells whether attention reads what changes from step to step (block tables, context
    lengths) from the tensors given to `plan`, so that a CUDA graph can be replayed with others in them.
    """

    STATIC_PLANS: bool

    def pack_linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """y[T, out] = x[T, in] @ weight[out, in].T + bias; the weight may be kept in another layout."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x[..., n] / sqrt(mean(x**2) + eps) * weight[n]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of x[T, n] + residual[T, n], and that sum: the next residual."""

    def rope_kv_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> Tensor:
        """Rotate queries and keys of qkv[T, Hq + 2 * Hkv, D] by cos, sin [T, D // 2] of each token;
        store keys and values at slots int64[T] of the caches. Returns the queries; may work in place."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up[T, 2 * n] = (gate, up)."""

    def plan_arrays(self, seqs: PagedSeqs, shape: AttentionShape) -> tuple[IntArray, ...]:
        """What plans of these sequences want on the device: to go over in one copy with other input."""

    def plan(self, seqs: PagedSeqs, window: int | None, arrays: Sequence[Tensor] = ()) -> Any:
        """Whatever attention needs to know once per forward pass, for all layers with this sliding window.

        `arrays`: those of `plan_arrays` on the device; without them they are made when first needed.
        """

    def paged_prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any, scale: float) -> Tensor:
        """Causal attention of q[T, Hq, D] over each sequence's cached context, whose last tokens q are."""

    def paged_decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any, scale: float) -> Tensor:
        """The same for one new token per sequence: q[S, Hq, D]."""

    def layers_of(self, caches: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Whatever `block_copies` needs to know of the caches, one pair a layer; made once."""

    def block_copies(self, layers: Any, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first n slots of block src to block dst, in all layers, for each (src, dst, n) in turn."""


def select(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The implementation for a device and dtype, or the one `WARMROUTE_KERNELS` names."""
    name = os.environ.get("WARMROUTE_KERNELS", "") or _default(device, dtype)
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"WARMROUTE_KERNELS={name!r}: known are {', '.join(IMPLEMENTATIONS)}")
    if name == "cpu" and (device.type != "cpu" or dtype != torch.float32):
        raise ValueError(f"WARMROUTE_KERNELS=cpu is for float32 on a CPU only, not {dtype} on {device}")
    if name == "triton" and dtype not in TRITON_DTYPES:
        raise ValueError(f"WARMROUTE_KERNELS=triton is for 16-bit and 32-bit floats only, not {dtype}")
    try:
        return cast(Kernels, importlib.import_module(f"kernels.{name}"))
    except ImportError as error:
        if name not in STAND_INS:
            raise
        log.warning("kernels.%s cannot be used, kernels.%s is, slower: %s", name, STAND_INS[name], error)
        return cast(Kernels, importlib.import_module(f"kernels.{STAND_INS[name]}"))


def _default(device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cuda" and dtype in TRITON_DTYPES:
        return "triton"
    return "cpu" if device.type == "cpu" and dtype == torch.float32 else "reference"
