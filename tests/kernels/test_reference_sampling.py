"""The float64 sampler: its filters and its random numbers are the replica's."""

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


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 7, 2**33])
def test_random_numbers_are_those_of_the_replica(seed, position):
    assert sampling.uniform(seed, position) == sampler.uniform([seed], [position])[0]


def test_uniform_numbers_are_uniform():
    draws = [sampling.uniform(seed, position) for seed in range(40) for position in range(50)]
    assert min(draws) >= 0 and max(draws) < 1
    counts = np.histogram(draws, bins=10, range=(0, 1))[0]
    # Chi squared of 9 degrees of freedom: 27.9 is passed once in a thousand.
    assert ((counts - 200) ** 2 / 200).sum() < 27.9
    assert sampling.uniform(-1, 2) == sampling.uniform((1 << 64) - 1, 2)
