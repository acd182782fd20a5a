"""The operations as Triton kernels, for CUDA devices and float16, bfloat16 or float32.

The protocol of `kernels.ops`, and what a GPU engine needs beyond it. One file a kernel, its truth of the same
name in `kernels.reference`; tiles in `configs`. With `TRITON_INTERPRET=1` set before Triton is first imported
the kernels run on CPU tensors, slowly: that is how tests check them without a GPU.

Triton is always imported by its full name; this package is `kernels.triton`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels.grouped import Weight, dense
from kernels.ops import Linear
from kernels.triton.block_copy import block_copies, block_gather, block_scatter
from kernels.triton.kv_quantize import kv_dequantize, kv_quantize
from kernels.triton.layers import Layers, layers_of
from kernels.triton.paged_decode import paged_decode
from kernels.triton.paged_prefill import paged_prefill
from kernels.triton.plan import STATIC_PLANS, Plan, plan, plan_arrays
from kernels.triton.prefix_hash import prefix_hash
from kernels.triton.rms_norm import add_rms_norm, rms_norm
from kernels.triton.rope_kv_write import rope_kv_write
from kernels.triton.rope_shift import rope_shift
from kernels.triton.sample import sample
from kernels.triton.silu_mul import silu_mul

__all__ = [
    "STATIC_PLANS",
    "Layers",
    "Plan",
    "add_rms_norm",
    "block_copies",
    "block_gather",
    "block_scatter",
    "kv_dequantize",
    "kv_quantize",
    "layers_of",
    "pack_linear",
    "paged_decode",
    "paged_prefill",
    "plan",
    "plan_arrays",
    "prefix_hash",
    "rms_norm",
    "rope_kv_write",
    "rope_shift",
    "sample",
    "silu_mul",
]


def pack_linear(weight: Weight, bias: Tensor | None) -> Linear:
    """x @ weight.T + bias by cuBLAS, in the dtype of the weight; a quantized weight is made dense."""
    plain = dense(weight)
    return lambda x: F.linear(x, plain, bias)
