"""Caches of more than 2**31 numbers: whatever lies at their end is found, written and copied there."""

import numpy as np
import pytest
import torch

from kernels import ops
from kernels import triton as fast

PAGE, HEADS, DIM = 16, 2, 64
BLOCKS = (1 << 31) // (PAGE * HEADS * DIM) + 3
SCALES = ([0.5, 2.0], [1.0, 0.25])


@pytest.fixture
def caches(device):
    """float8 zeros; on a CPU memory is taken only where something is written."""
    shape = (BLOCKS, PAGE, HEADS, DIM)
    if device.type == "cpu":
        return [torch.from_numpy(np.zeros(shape, np.uint8)).view(torch.float8_e4m3fn) for _ in "kv"]
    return [torch.zeros(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn) for _ in "kv"]


def test_far_blocks(device, caches, normal):
    near, far = (1, 0), (BLOCKS - 1, BLOCKS - 2)
    scales = tuple(torch.tensor(pair, device=device) for pair in SCALES)
    qkv = normal(20, 8, DIM).float()
    angle = torch.linspace(0, 1, 20 * DIM // 2, device=device).view(20, -1)
    found = []
    for blocks in (near, far):
        slots = [blocks[i // PAGE] * PAGE + i % PAGE for i in range(20)]
        slots = torch.tensor(slots, device=device)
        q = fast.rope_kv_write(qkv.clone(), angle.cos(), angle.sin(), *caches, slots, kv_scales=scales)
        table = torch.tensor([blocks])
        prefill = fast.plan(ops.PagedSeqs((20,), (20,), table, PAGE), None)
        decode = fast.plan(ops.PagedSeqs((1,), (20,), table, PAGE), None)
        whole = fast.paged_prefill(q, *caches, prefill, 0.1, kv_scales=scales)
        last = fast.paged_decode(q[-1:], *caches, decode, 0.1, kv_scales=scales, piece=16)
        found.append((whole, last))
    assert all(torch.equal(here, there) for here, there in zip(*found, strict=True))
    assert found[0][0].abs().min() > 0
    layers = fast.layers_of([tuple(caches)])
    fast.block_copies(layers, [(far[0], 2, PAGE), (near[1], BLOCKS - 3, PAGE)])
    for cache in (cache.view(torch.uint8) for cache in caches):
        assert torch.equal(cache[2], cache[near[0]]) and torch.equal(cache[BLOCKS - 3], cache[far[1]])
    staged = fast.block_gather(layers, torch.tensor(far, device=device))
    assert torch.equal(staged[1, 0, 1].view(torch.uint8), caches[1].view(torch.uint8)[far[1]])
