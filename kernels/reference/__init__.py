"""The operations in plain torch, written to be read: the truth other implementations are measured against.

Any dtype and device, float64 too. Shapes are those of `kernels.ops.Kernels`; what goes beyond that protocol
(the options of the GPU kernels) is described where it is defined. One file a theme.
"""

from __future__ import annotations

from kernels.reference.attention import STATIC_PLANS, Plan, paged_decode, paged_prefill, plan, plan_arrays
from kernels.reference.blocks import (
    block_copies,
    block_gather,
    block_scatter,
    kv_write,
    layers_of,
    rope_kv_write,
    rope_shift,
)
from kernels.reference.hashing import prefix_hash
from kernels.reference.layers import add_rms_norm, pack_linear, rms_norm, rope, silu_mul
from kernels.reference.quantize import E4M3_MAX, INT8_MAX, kv_dequantize, kv_quantize
from kernels.reference.sampling import sample

__all__ = [
    "E4M3_MAX",
    "INT8_MAX",
    "STATIC_PLANS",
    "Plan",
    "add_rms_norm",
    "block_copies",
    "block_gather",
    "block_scatter",
    "kv_dequantize",
    "kv_quantize",
    "kv_write",
    "layers_of",
    "pack_linear",
    "paged_decode",
    "paged_prefill",
    "plan",
    "plan_arrays",
    "prefix_hash",
    "rms_norm",
    "rope",
    "rope_kv_write",
    "rope_shift",
    "sample",
    "silu_mul",
]
