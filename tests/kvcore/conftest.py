"""A tiny cache with a clock that the test turns, and prompts that are easy to read."""

import numpy as np
import pytest

from kvcore.cache import PrefixCache
from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ns():
    return Namespace("weights-1", layout="f32/4")


@pytest.fixture
def make_cache(clock):
    def make(num_blocks=8, block_size=4, bits=64, **options):
        hasher = PrefixHasher(b"test secret", bits=bits)
        return PrefixCache(num_blocks, block_size, hasher, clock=clock, epoch=77, **options)

    return make


@pytest.fixture
def cache(make_cache):
    return make_cache()


@pytest.fixture
def run():
    """A whole life of one sequence: claim, commit everything, release. Returns the lease."""

    def run(cache, tokens, namespace, **options):
        lease = cache.claim(np.array(tokens, dtype=np.int32), namespace, **options)
        cache.commit(lease, len(tokens))
        cache.release(lease)
        cache.check()
        return lease

    return run
