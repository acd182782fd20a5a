"""The hash table alone: against a dictionary, with good and bad keys, and when every bucket overflows."""

import random

import numpy as np
import pytest

from kvcore import index

SIZE = 600
ODD = 0x9E3779B97F4A7C15  # what keys are multiplied with before they are placed


def placed(mixed):
    """The key that is placed as if it were `mixed` after the multiplication."""
    return mixed * pow(ODD, -1, 1 << 64) % (1 << 64)


KEYS = {
    "random": lambda i: random.Random(i).getrandbits(64),
    "sequential": lambda i: i,
    "one bucket, one tag": lambda i: placed(i),
    "the last bucket": lambda i: placed((1 << 64) - 1 - i),
}


def new_pool(make_cache, keys):
    pool = make_cache(num_blocks=len(keys))._state.pool
    pool.blocks["hash"] = keys
    return pool


@pytest.mark.parametrize("kind", KEYS)
def test_against_a_dictionary(make_cache, kind):
    keys = np.array([KEYS[kind](i) for i in range(SIZE)], dtype=np.uint64)
    pool, model, rng = new_pool(make_cache, keys), set(), random.Random(kind)
    for _ in range(60):
        absent = sorted(set(range(SIZE)) - model)
        for block in rng.sample(absent, min(len(absent), rng.choice([1, 3, 100]))):
            index.insert(pool, block)
            model.add(block)
        for block in rng.sample(sorted(model), min(len(model), rng.choice([0, 1, 5, 90]))):
            index.remove(pool, block)
            model.remove(block)
        assert [index.find(pool, key) for key in keys] == [i if i in model else -1 for i in range(SIZE)]
    for block in sorted(model):
        index.remove(pool, block)
    assert not pool.slots.any(), "neither an entry nor a count is left"


def test_a_full_table(make_cache):
    keys = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    pool = new_pool(make_cache, keys)
    for block in range(len(keys)):
        index.insert(pool, block)
    assert [index.find(pool, key) for key in keys] == list(range(len(keys)))
    assert {index.find(pool, key ^ np.uint64(1)) for key in keys} == {-1}


def test_an_absent_key_is_not_searched_for_ever(make_cache):
    """One block after another is made to pass a full bucket, until no bucket ends a search any more."""
    pool = new_pool(make_cache, np.zeros(SIZE, dtype=np.uint64))
    buckets = len(pool.slots)
    stay, passing = range(buckets), range(buckets, buckets + 15)

    def insert(block, bucket):
        pool.blocks["hash"][block] = placed((((bucket << 32) // buckets + 1) << 32) + block)
        index.insert(pool, block)

    for bucket in range(buckets):
        crowd = passing[: 15 if bucket == 0 else 14]
        for block in [*crowd, stay[bucket]]:
            insert(block, bucket)
        for block in crowd:
            index.remove(pool, block)
    assert pool.slots[:, 0].tolist() == [1] * buckets
    assert index.find(pool, np.uint64(placed(7 << 32))) == -1
    assert [index.find(pool, pool.blocks["hash"][block]) for block in stay] == list(stay)
