"""Blocks copied, gathered, scattered, shifted and put in 8 bits, in all layers; the rest stays as it was."""

import pytest
import torch

from kernels import reference
from kernels import triton as fast

SHAPES = [
    (16, 2, 64, torch.bfloat16),
    (16, 3, 10, torch.float16),
    (32, 1, 6, torch.float32),
    (5, 1, 3, torch.int8),
]


def make_caches(shape, device, layers=3, blocks=6):
    page, heads, dim, dtype = shape
    values = torch.randn(layers, 2, blocks, page, heads, dim, generator=torch.Generator().manual_seed(0))
    return (30 * values).to(dtype).to(device)


def pairs(stacked):
    return [(pair[0], pair[1]) for pair in stacked]


@pytest.mark.parametrize("shape", SHAPES)
def test_copies_as_if_one_after_another(device, shape):
    page = shape[0]
    caches = make_caches(shape, device)
    expected = caches.clone()
    copies = [(0, 1, page), (2, 3, 1), (2, 4, page - 1), (1, 5, 2), (5, 0, page), (0, 5, 0)]
    reference.block_copies(pairs(expected), copies)
    fast.block_copies(fast.layers_of(caches), copies)
    assert torch.equal(caches, expected)


def test_no_copies(device):
    caches = make_caches(SHAPES[0], device)
    before = caches.clone()
    fast.block_copies(fast.layers_of(caches), [])
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    layers = fast.layers_of(caches)
    fast.block_scatter(layers, nothing, fast.block_gather(layers, nothing))
    assert torch.equal(caches, before)


@pytest.mark.parametrize("shape", SHAPES)
def test_gather_and_scatter(device, shape):
    caches = make_caches(shape, device)
    # Separate tensors, as the model allocates them.
    apart = [(k.clone(), v.clone()) for k, v in pairs(caches)]
    layers = fast.layers_of(apart)
    src, dst = torch.tensor([4, 0], device=device), torch.tensor([1, 5], device=device)
    staged = fast.block_gather(layers, src)
    assert torch.equal(staged, reference.block_gather(apart, src))
    fast.block_scatter(layers, dst, staged)
    reference.block_scatter(pairs(caches), dst, staged)
    assert all(
        torch.equal(a, b)
        for got, want in zip(apart, caches, strict=True)
        for a, b in zip(got, want, strict=True)
    )


def test_caches_must_be_alike(device):
    a, b = torch.zeros(2, 4, 1, 8, device=device), torch.zeros(2, 4, 2, 8, device=device)
    with pytest.raises(ValueError, match="one shape"):
        fast.layers_of([(a, a), (a, b)])
    with pytest.raises(ValueError, match="contiguous"):
        fast.layers_of([(b[:, :, :1], b[:, :, 1:])])


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_rope_shift(device, close, shape):
    dim, dtype = shape[2:]
    caches = make_caches(shape, device)
    caches[:, :, 3] = torch.nan
    before = caches.clone()
    blocks = torch.tensor([5, 1], device=device)
    angle = torch.rand(2, dim // 2, generator=torch.Generator().manual_seed(1)).double().to(device)
    expected = caches.double()
    reference.rope_shift(pairs(expected), blocks, angle.cos(), angle.sin())
    fast.rope_shift(fast.layers_of(caches), blocks, angle.cos(), angle.sin())
    close(caches[:, 0, blocks], expected[:, 0, blocks], dtype)
    caches[:, 0, blocks] = before[:, 0, blocks]
    assert torch.equal(caches.nan_to_num(7), before.nan_to_num(7))


def test_keys_shifted_are_keys_computed_there(device, close):
    """Rotated at positions 3 ... 18 and shifted by 40: as rotated at 43 ... 58."""
    keys = torch.randn(16, 2, 8, generator=torch.Generator().manual_seed(0)).double().to(device)
    rates = 10000.0 ** -(torch.arange(4) / 4).double().to(device)

    def at(positions):
        angle = positions.double().to(device)[:, None] * rates
        return angle.cos(), angle.sin()

    here, there = (reference.rope(keys, *at(torch.arange(16) + start)) for start in (3, 43))
    cache = torch.stack([here, here])[None].float()
    fast.rope_shift(
        fast.layers_of([(cache[:, 0], cache[:, 1])]),
        torch.tensor([0], device=device),
        *at(torch.tensor([40])),
    )
    close(cache[0, 0], there, torch.float32, times=4)


def test_float8_keys_are_not_shifted(device):
    cache = torch.zeros(1, 4, 1, 8, device=device).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="float8"):
        fast.rope_shift(fast.layers_of([(cache, cache)]), torch.tensor([0]), *torch.zeros(2, 1, 4))


@pytest.mark.parametrize("to", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_quantize(device, close, shape, to):
    page, _, _, dtype = shape
    caches = make_caches(shape, device)
    caches[1, 0, 2] = 0
    caches[:, :, 4, 3:] = torch.nan
    blocks, lengths = torch.tensor([4, 2], device=device), torch.tensor([3, page], device=device)
    codes, scales = fast.kv_quantize(fast.layers_of(caches), blocks, lengths, to)
    right, right_scales = reference.kv_quantize(pairs(caches.float()), blocks, lengths, to)
    assert torch.equal(scales, right_scales) and (scales[1, 1, 0] == 1).all()
    assert torch.equal(codes.view(torch.int8), right.view(torch.int8))
    back = caches.clone()
    fast.kv_dequantize(fast.layers_of(back), blocks, codes, scales)
    reference.kv_dequantize(pairs(caches), blocks, codes, scales)
    close(back[:, :, blocks], caches[:, :, blocks].double(), dtype)
    back[:, :, blocks] = caches[:, :, blocks]
    assert torch.equal(back, caches)


def test_error_of_8_bits(device):
    """Half a step of the largest value for int8; half of the last of three bits for float8."""
    caches = make_caches((16, 2, 64, torch.float32), device)
    layers, blocks, lengths = fast.layers_of(caches), *torch.tensor([[1], [16]], device=device)
    before, top = caches[:, :, 1].clone(), caches[:, :, 1].abs().amax((2, 4), keepdim=True)
    for to, bound in (
        (torch.int8, top / 254),
        (torch.float8_e4m3fn, (before.abs() / 16).clamp(min=0) + top / 448 / 512),
    ):
        fast.kv_dequantize(layers, blocks, *fast.kv_quantize(layers, blocks, lengths, to))
        assert ((caches[:, :, 1] - before).abs() <= bound * 1.0001).all()
        caches[:, :, 1] = before
