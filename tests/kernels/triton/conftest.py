"""Tests of the Triton kernels: on a GPU where there is one, else in Triton's interpreter.

The interpreter must be chosen before Triton is first imported, so without a GPU these files are left to
`tests/kernels/test_triton.py`, which runs them in a process of their own. To run one of them directly:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/triton
"""

import os

import pytest
import torch

from kernels import ops, reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if torch.cuda.is_available() or INTERPRETED else ["test_*.py"]

# Of the largest error, relative to the largest value: a few units of rounding.
BOUNDS = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(scope="session")
def device():
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(scope="session", autouse=True)
def poisoned():
    """`torch.empty` gives NaN and the largest integers: what a kernel leaves unwritten shows."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture(scope="session")
def normal(device):
    """float64 normal numbers that `dtype` can represent."""

    def make(*shape, dtype=torch.float32, seed=0):
        values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return values.to(dtype).double().to(device)

    return make


@pytest.fixture(scope="session")
def close():
    """Whether values of a narrow dtype are the float64 ones, up to rounding."""

    def check(actual, expected, dtype, times=1.0):
        assert actual.dtype == dtype and actual.shape == expected.shape
        assert not actual.isnan().any()
        error = (actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-300)
        assert error <= times * BOUNDS[dtype], f"relative error {error}"

    return check


@pytest.fixture(scope="session")
def paged(normal, device):
    """float64 caches whose unused slots are NaN, and the tables of (new, context) sequences into them."""

    def make(sequences, kv_heads, dim, page, dtype):
        counts = [-(-context // page) for _, context in sequences]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(5))
        caches = [torch.full((len(order), page, kv_heads, dim), torch.nan).double().to(device) for _ in "kv"]
        tables = torch.full((len(sequences), max(counts) + 1), 10**6)
        for row, ((_, context), count) in enumerate(zip(sequences, counts, strict=True)):
            start = 1 + sum(counts[:row])
            tables[row, :count] = order[start : start + count]
            at = torch.arange(context)
            slots = (tables[row, at // page] * page + at % page).to(device)
            k, v = normal(2, context, kv_heads, dim, dtype=dtype, seed=row)
            reference.kv_write(k, v, *caches, slots)
        lens = tuple(zip(*sequences, strict=True))
        return caches, ops.PagedSeqs(lens[0], lens[1], tables, page)

    return make
