"""The float64 sampler: its filters are the replica's, its random numbers those of Philox."""

import numpy as np
import pytest
import torch

from kernels.reference import sampling
from replica import sampler
from replica.request import SamplingParams


@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-9])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 1.0])
def test_filters_are_those_of_the_replica(top_k, top_p, min_p):
    rng = np.random.default_rng(0)
    for step in (0.0, 0.5):  # with a step: many ties
        scores = rng.normal(size=300) * 2
        scores = np.round(scores / step) * step if step else scores
        weights = np.exp(scores - scores.max())
        weights = (weights / weights.sum()).astype(np.float32)
        params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
        expected = sampler._kept(weights, params, len(weights))
        found = sampling.kept(torch.from_numpy(weights).double(), top_k, top_p, min_p)
        assert found.tolist() == expected.tolist()


def test_philox():
    """The known answer of Random123 for Philox 4x32-10."""
    assert sampling.philox(0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert sampling.philox(0, 1) != sampling.philox(1, 0)


def test_uniform_numbers_are_uniform():
    draws = [sampling.uniform(seed, position) for seed in range(40) for position in range(50)]
    assert min(draws) >= 0 and max(draws) < 1
    counts = np.histogram(draws, bins=10, range=(0, 1))[0]
    # Chi squared of 9 degrees of freedom: 27.9 is passed once in a thousand.
    assert ((counts - 200) ** 2 / 200).sum() < 27.9
    assert sampling.uniform(-1, 2) == sampling.uniform((1 << 64) - 1, 2)
