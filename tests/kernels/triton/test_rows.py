"""What happens to each token's row by itself, against float64; cache slots that are not written stay NaN."""

import pytest
import torch

from kernels import reference
from kernels import triton as fast

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5), (3, 576), (129, 64), (2, 3, 10)])
def test_rms_norm(normal, close, shape, dtype):
    x, weight = normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype, seed=1)
    expected = reference.rms_norm(x, weight, 1e-5)
    close(fast.rms_norm(x.to(dtype), weight.to(dtype), 1e-5), expected, dtype)


def test_rms_norm_reads_slices(normal, close):
    """The model hands in the query heads of the fused projection."""
    fused, weight = normal(5, 7, 10), normal(10, seed=1)
    expected = reference.rms_norm(fused[:, 2:6], weight, 1e-5)
    close(fast.rms_norm(fused.float()[:, 2:6], weight.float(), 1e-5), expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(normal, close, dtype):
    x, residual, weight = (normal(*s, dtype=dtype, seed=i) for i, s in enumerate([(63, 80), (63, 80), (80,)]))
    normed, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    narrow = (part.to(dtype) for part in (x, residual, weight))
    actual, actual_total = fast.add_rms_norm(*narrow, 1e-5)
    close(actual, normed, dtype)
    close(actual_total, total, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 1025])
def test_silu_mul(normal, close, width, dtype):
    x = normal(3, 2 * width, dtype=dtype)
    close(fast.silu_mul(x.to(dtype)), reference.silu_mul(x), dtype)


def tables(tokens, half, device):
    """Strides that are not those of a fresh tensor."""
    angle = torch.rand(half, tokens, generator=torch.Generator().manual_seed(1)).double().T.to(device)
    return angle.cos(), angle.sin()


def empty_caches(dtype, device, kv_heads=2, dim=10):
    """Four blocks of 16; float8 NaN reads as itself."""
    return [torch.full((4, 16, kv_heads, dim), torch.nan, device=device).to(dtype) for _ in "kv"]


def written(cache, slots):
    """The slots given, after a look at all others."""
    flat = cache.float().flatten(0, 1)
    rest = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
    rest[slots] = False
    assert flat[rest].isnan().all()
    return flat[slots]


SLOTS = [63, 0, 17, 16, 15]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads", [(3, 1), (4, 4), (16, 2)])
def test_rope_kv_write(normal, close, device, dtype, heads, kv_heads):
    qkv = normal(5, heads + 2 * kv_heads, 10, dtype=dtype)
    cos, sin = tables(5, 5, device)
    slots = torch.tensor(SLOTS, device=device)
    wide, narrow = (empty_caches(t, device, kv_heads) for t in (torch.float64, dtype))
    expected = reference.rope_kv_write(qkv, cos, sin, *wide, slots)
    close(fast.rope_kv_write(qkv.to(dtype), cos.float(), sin.float(), *narrow, slots), expected, dtype)
    for got, truth in zip(narrow, wide, strict=True):
        close(written(got, slots).to(dtype), truth.flatten(0, 1)[slots], dtype)


def test_float8_writes(normal, device):
    float8 = torch.float8_e4m3fn
    slots = torch.tensor(SLOTS, device=device)
    qkv, (cos, sin) = 50 * normal(5, 5 + 4, 10), tables(5, 5, device)
    scales = tuple(torch.tensor(pair, device=device) for pair in ([0.25, 2.0], [1.0, 0.03125]))
    fused, truth = (empty_caches(float8, device) for _ in range(2))
    reference.rope_kv_write(qkv, cos, sin, *truth, slots, kv_scales=scales)
    fast.rope_kv_write(qkv.float(), cos.float(), sin.float(), *fused, slots, kv_scales=scales)
    for got, right in zip(fused, truth, strict=True):
        assert torch.equal(written(got, slots), written(right, slots))
    assert written(fused[1], slots).abs().max() == 448


def test_no_tokens_at_all(device):
    none = torch.zeros(0, 6, 10, device=device)
    caches = empty_caches(torch.float32, device)
    slots = torch.zeros(0, dtype=torch.int64, device=device)
    assert fast.rope_kv_write(none, none[:, 0, :5], none[:, 0, :5], *caches, slots).shape == (0, 2, 10)
    assert fast.rms_norm(none, none.new_ones(10), 1e-5).shape == none.shape
    assert fast.silu_mul(none[:, 0]).shape == (0, 5)
    assert all(cache.isnan().all() for cache in caches)
