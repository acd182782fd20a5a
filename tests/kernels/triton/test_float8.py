"""float8 conversions: every code, and every kind of number on the way back."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.triton import configs
from kernels.triton.float8 import from_e4m3, to_e4m3


@triton.jit
def read_kernel(codes, out, NATIVE: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, from_e4m3(tl.load(codes + at), NATIVE))


@triton.jit
def write_kernel(values, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, to_e4m3(tl.load(values + at)))


@pytest.mark.parametrize("native", [False, True])
def test_every_code(device, native):
    if native and device.type == "cuda" and not configs.converts_float8(device):
        pytest.skip("this GPU has no such instruction")
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.empty(256, dtype=torch.float16, device=device)
    read_kernel[(1,)](codes, out, NATIVE=native)
    truth = codes.view(torch.float8_e4m3fn).to(torch.float16)
    numbers = ~truth.isnan()
    assert numbers.sum() == 254 and torch.equal(out[numbers], truth[numbers])


def test_numbers_between_the_codes(device):
    """All codes, halfway between them (ties go to even), just beside that, and far beyond."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    beside = torch.cat([middle * (1 + 2e-7), middle * (1 - 2e-7)])
    values = torch.cat([codes, middle, beside, torch.tensor([464.0, 1e30, torch.inf, 1e-30, 0.0])])
    values = torch.cat([values, -values, torch.randn(6, generator=torch.Generator().manual_seed(0))])
    values = torch.nn.functional.pad(values, (0, -len(values) % 256)).to(device)
    out = torch.empty(len(values), dtype=torch.uint8, device=device)
    write_kernel[(len(values) // 256,)](values, out, SIZE=256)
    truth = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(out, truth.view(torch.uint8))
