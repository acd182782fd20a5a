"""The device's block hashes are the cache core's, bit for bit."""

import numpy as np
import pytest
import torch

from kernels import reference
from kernels import triton as fast
from kvcore.hashing import PrefixHasher


@pytest.mark.parametrize("bits", [64, 20])
@pytest.mark.parametrize(
    "size, lens", [(16, [0, 5, 16, 2200, 33]), (1, [3]), (7, [63, 129]), (512, [512, 1700])]
)
def test_bit_by_bit(device, size, lens, bits):
    hasher = PrefixHasher(b"secret", bits)
    add, mul, step = hasher._constants(size)
    rng = np.random.default_rng(size)
    tokens = rng.integers(-(1 << 31), 1 << 31, sum(lens)).astype(np.int32)
    roots = [int(root) for root in rng.integers(0, 1 << 64, len(lens), dtype=np.uint64)]
    prompts = np.split(tokens, np.cumsum(lens)[:-1])
    expected = [hasher.block_hashes(p, size, root) for p, root in zip(prompts, roots, strict=True)]
    mask = (1 << bits) - 1
    found = reference.prefix_hash(prompts, add, mul, int(step), roots, mask)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    words = [torch.from_numpy(part.view(np.int64)).to(device) for part in (add, mul)]
    on_device = torch.from_numpy(tokens).to(device)
    hashes = fast.prefix_hash(on_device, lens, *words, int(step), roots, mask)
    assert np.array_equal(hashes.cpu().numpy().view(np.uint64), np.concatenate(expected))


def test_no_full_block(device):
    words = torch.ones(16, dtype=torch.int64, device=device)
    tokens = torch.zeros(15, dtype=torch.int32, device=device)
    assert len(fast.prefix_hash(tokens, [15], words, words, 1, [0], 1)) == 0
