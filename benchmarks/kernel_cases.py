"""One example of each Triton kernel: what it is run on, what is right, and the least it has to move.

Shared by `gpu.py` (checks and times on a GPU) and `kernel_resources.py` (compiles without one).
"""

from functools import partial

import numpy as np
import torch
from kernel_inputs import Case, angles, normal, paged, rounding, stacked, write_target

from kernels import reference
from kernels import triton as fast
from kernels.triton.block_copy import copy_all


def builders(size, device, dtype, *, dims=()):
    """Functions that build a case each: every kernel, attention in its variants and for other `dims` too."""
    variants = [
        {},
        {"window": size.context // 3, "softcap": 20.0},
        {"float8": True},
        *({"dim": d} for d in dims),
    ]
    attention = [partial(make, size, device, dtype, **v) for make in (prefill, decode) for v in variants]
    return [*attention, *small_builders(size, device, dtype)]


def small_builders(size, device, dtype):
    """Everything but attention."""
    plain = (rms_norm, add_rms_norm, silu_mul)
    blocks = (block_copy, block_gather, block_scatter, rope_shift)
    formats = [(make, to) for make in (quantize, dequantize) for to in (torch.float8_e4m3fn, torch.int8)]
    return [
        *(partial(rope_kv_write, size, device, dtype, float8=float8) for float8 in (False, True)),
        *(partial(make, size, device, dtype) for make in (*plain, *blocks)),
        *(partial(make, size, device, dtype, to) for make, to in formats),
        *(partial(make, size, device) for make in (prefix_hash, sample)),
    ]


def attention(name, lens, size, device, dtype, dim, window, softcap, float8):
    dim = dim or size.dim
    caches, scales, seqs = paged(lens, size, device, dtype, dim, float8)
    rows = sum(new for new, _ in lens)
    q = normal(rows, size.heads, dim, device=device, dtype=dtype, seed=4)
    plan, run = fast.plan(seqs, window), getattr(fast, f"paged_{name}")
    options = {"softcap": softcap, "kv_scales": scales}

    def truth():
        truth_plan, wide = reference.plan(seqs, window), [cache.to(torch.float64) for cache in caches]
        return [reference.paged_prefill(q.double(), *wide, truth_plan, dim**-0.5, **options)]

    kv_tokens = sum(min(context, (window or context) + new) for new, context in lens)
    pairs = sum(new * (context - (new - 1) / 2) for new, context in lens)
    extras = [f"dim {dim}", *(["window"] if window else []), *(["soft cap"] if softcap else [])]
    return Case(
        f"paged_{name} ({', '.join([*extras, *(['float8 KV'] if float8 else [])])})",
        lambda **tile: [run(q, *caches, plan, dim**-0.5, **options, **tile)],
        truth,
        2 * kv_tokens * size.kv_heads * dim * caches[0].element_size() + 2 * q.nbytes,
        rounding(dtype),
        4 * pairs * size.heads * dim,
    )


def prefill(size, device, dtype, *, lens=None, dim=None, window=None, softcap=None, float8=False):
    lens = lens or size.prefills
    return attention("prefill", lens, size, device, dtype, dim, window, softcap, float8)


def decode(size, device, dtype, *, dim=None, window=None, softcap=None, float8=False):
    lens = [(1, size.context - i) for i in range(size.batch)]
    return attention("decode", lens, size, device, dtype, dim, window, softcap, float8)


def rope_kv_write(size, device, dtype, *, float8=False):
    qkv = normal(size.rows, size.heads + 2 * size.kv_heads, size.dim, device=device, dtype=dtype)
    caches, scales, slots = write_target(size, device, dtype, float8)
    cos, sin = angles(size.rows, size, device, dtype)

    def outputs(q, caches=caches):
        return [q, *(cache.to(torch.float64) for cache in caches)]

    def truth():
        wide = [cache.clone() if float8 else cache.double() for cache in caches]
        q = reference.rope_kv_write(qkv.double(), cos.double(), sin.double(), *wide, slots, kv_scales=scales)
        return outputs(q, wide)

    written = 2 * size.rows * size.kv_heads * size.dim * caches[0].element_size()
    q_bytes = size.rows * size.heads * size.dim * qkv.element_size()
    return Case(
        f"rope_kv_write{' (float8 KV)' if float8 else ''}",
        lambda: fast.rope_kv_write(qkv, cos, sin, *caches, slots, kv_scales=scales),
        truth,
        qkv.nbytes + q_bytes + written + 2 * cos.nbytes,
        # A tie rounded the other way: one step of float8 at the largest number.
        1 / 13 if float8 else rounding(dtype),
        outputs=outputs,
    )


def rms_norm(size, device, dtype):
    x = normal(size.rows, size.hidden, device=device, dtype=dtype)
    weight = normal(size.hidden, device=device, dtype=dtype, seed=1)
    return Case(
        "rms_norm",
        lambda: [fast.rms_norm(x, weight, 1e-5)],
        lambda: [reference.rms_norm(x.double(), weight.double(), 1e-5)],
        2 * x.nbytes,
        rounding(dtype),
    )


def add_rms_norm(size, device, dtype):
    x, residual = (normal(size.rows, size.hidden, device=device, dtype=dtype, seed=s) for s in (1, 2))
    weight = normal(size.hidden, device=device, dtype=dtype, seed=3)
    return Case(
        "add_rms_norm",
        lambda: fast.add_rms_norm(x, residual, weight, 1e-5),
        lambda: reference.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5),
        4 * x.nbytes,
        rounding(dtype),
    )


def silu_mul(size, device, dtype):
    x = normal(size.rows, 2 * size.inner, device=device, dtype=dtype)
    return Case(
        "silu_mul",
        lambda: [fast.silu_mul(x)],
        lambda: [reference.silu_mul(x.double())],
        x.nbytes * 3 // 2,
        rounding(dtype),
    )


def block_copy(size, device, dtype):
    caches, layers, src, dst, moved = stacked(size, device, dtype)
    tokens = torch.full_like(src, size.page)

    def truth():
        wide = caches.clone()
        triples = zip(src.tolist(), dst.tolist(), tokens.tolist(), strict=True)
        reference.block_copies([tuple(pair) for pair in wide], list(triples))
        return [wide]

    def run():
        copy_all(layers, src, dst, tokens)
        return [caches]

    return Case("block_copy", run, truth, 2 * moved)


def block_gather(size, device, dtype):
    caches, layers, src, _, moved = stacked(size, device, dtype)
    return Case(
        "block_gather",
        lambda: [fast.block_gather(layers, src)],
        lambda: [reference.block_gather([tuple(pair) for pair in caches], src)],
        2 * moved,
    )


def block_scatter(size, device, dtype):
    caches, layers, src, dst, moved = stacked(size, device, dtype)
    staged = fast.block_gather(layers, src)

    def truth():
        wide = caches.clone()
        reference.block_scatter([tuple(pair) for pair in wide], dst, staged)
        return [wide]

    def run():
        fast.block_scatter(layers, dst, staged)
        return [caches]

    return Case("block_scatter", run, truth, 2 * moved)


def rope_shift(size, device, dtype):
    caches, layers, src, _, moved = stacked(size, device, dtype)
    cos, sin = angles(size.blocks, size, device, torch.float32)

    def truth():
        wide = caches.double()
        reference.rope_shift([tuple(pair) for pair in wide], src, cos.double(), sin.double())
        return [wide]

    def run():
        fast.rope_shift(layers, src, cos, sin)
        return [caches]

    return Case("rope_shift", run, truth, moved, rounding(dtype))


def quantize(size, device, dtype, to):
    caches, layers, src, _, moved = stacked(size, device, dtype)
    lengths = torch.full_like(src, size.page)

    def values(codes, scales):
        return [codes.double() * scales.double()[:, :, :, None, :, None], scales]

    return Case(
        f"kv_quantize ({'int8' if to == torch.int8 else 'float8'})",
        lambda: fast.kv_quantize(layers, src, lengths, to),
        lambda: values(*reference.kv_quantize([tuple(p) for p in caches.double()], src, lengths, to)),
        moved + moved // dtype.itemsize,
        # As above: one step.
        1 / 126 if to == torch.int8 else 1 / 13,
        outputs=lambda found: values(*found),
    )


def dequantize(size, device, dtype, to):
    caches, layers, src, dst, moved = stacked(size, device, dtype)
    codes, scales = fast.kv_quantize(layers, src, torch.full_like(src, size.page), to)

    def truth():
        wide = caches.double()
        reference.kv_dequantize([tuple(pair) for pair in wide], dst, codes, scales.double())
        return [wide]

    def run():
        fast.kv_dequantize(layers, dst, codes, scales)
        return [caches]

    name = f"kv_dequantize ({'int8' if to == torch.int8 else 'float8'})"
    return Case(name, run, truth, moved + moved // dtype.itemsize, rounding(dtype))


def prefix_hash(size, device):
    rng = np.random.default_rng(0)
    lens = [size.context - i for i in range(size.batch)]
    tokens = rng.integers(0, size.vocab, sum(lens)).astype(np.int32)
    words = rng.integers(0, 1 << 64, 2 * size.page + 1 + len(lens), dtype=np.uint64)
    add, mul, (step, *roots) = np.split(words, [size.page, 2 * size.page])
    mask = (1 << 64) - 1
    on_device = [torch.from_numpy(x).to(device) for x in (tokens, add.view(np.int64), mul.view(np.int64))]
    step, roots = int(step), [int(root) for root in roots]

    def truth():
        prompts = np.split(tokens, np.cumsum(lens)[:-1])
        hashes = np.concatenate(reference.prefix_hash(prompts, add, mul, step, roots, mask))
        return [torch.from_numpy(hashes.view(np.int64)).to(device)]

    return Case(
        "prefix_hash",
        lambda: [fast.prefix_hash(on_device[0], lens, *on_device[1:], step, roots, mask)],
        truth,
        tokens.nbytes + sum(lens) // size.page * 8,
    )


def sample(size, device):
    rows = size.batch
    logits = 3 * normal(rows, size.vocab, device=device, dtype=torch.float32)
    arguments = (
        torch.linspace(0, 1.5, rows, device=device),
        torch.full((rows,), 50, dtype=torch.int32, device=device),
        torch.full((rows,), 0.9, device=device),
        torch.full((rows,), 0.01, device=device),
        torch.arange(rows, device=device) * 12345678901,
        torch.arange(rows, device=device) + 1000,
    )
    return Case(
        "sample",
        lambda: [fast.sample(logits, *arguments)],
        lambda: [reference.sample(logits, *arguments)],
        logits.nbytes,
    )
