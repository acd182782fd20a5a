"""The parts of the cache alone: hash index, eviction order, numbers of namespaces."""

import random

import numpy as np
import pytest

from kvcore.errors import InvalidRequest
from kvcore.eviction import LruOrder, make_order
from kvcore.index import HashIndex
from kvcore.spaces import Spaces


def ids(*values):
    return np.array(values, dtype=np.intp)


def crowded(count):
    """Distinct keys that all fall into one pair of buckets of any table: they differ after the spread."""
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
    return np.array([i * inverse % (1 << 64) for i in range(count)], dtype=np.uint64)


@pytest.mark.parametrize("kind", ["random", "sequential", "crowded"])
def test_the_index_against_a_dictionary(kind):
    size = 600
    rng = random.Random(kind)
    keys = {
        "random": np.array([rng.getrandbits(64) for _ in range(size)], dtype=np.uint64),
        "sequential": np.arange(size, dtype=np.uint64),
        "crowded": crowded(size),
    }[kind]
    index, model = HashIndex(keys), {}
    for _ in range(120):
        absent, present = [i for i in range(size) if i not in model], sorted(model)
        new = rng.sample(absent, min(len(absent), rng.choice([1, 3, 100])))
        index.insert(ids(*new))
        model.update((i, int(keys[i])) for i in new)
        old = rng.sample(present, min(len(present), rng.choice([0, 1, 5, 90])))
        index.remove(ids(*old))
        for i in old:
            del model[i]
        expected = [i if i in model else -1 for i in range(size)]
        assert index.find(keys).tolist() == expected
        assert [index.find_one(int(key)) for key in keys[:40]] == expected[:40]
        assert index.find(keys[:3]).tolist() == expected[:3]
        assert len(index) == len(model)
    assert (len(index._stash) > 100) == (kind == "crowded")
    index.remove(ids(*model))
    assert len(index) == len(index._stash) == 0 and (index._slots == -1).all()


def test_a_full_index_of_good_keys_needs_almost_no_stash():
    keys = np.random.default_rng(0).integers(0, 2**64, 50_000, dtype=np.uint64)
    index = HashIndex(keys)
    for start in range(0, 50_000, 500):
        index.insert(np.arange(start, start + 500))
    assert len(index._stash) < 300
    assert np.array_equal(index.find(keys), np.arange(50_000))
    assert index.find(keys ^ np.uint64(1)).max() == -1


def test_empty_calls():
    index = HashIndex(np.zeros(4, dtype=np.uint64))
    index.insert(ids())
    index.remove(ids())
    assert index.find(np.array([], dtype=np.uint64)).tolist() == []
    assert index.find_one(0) == -1
    order = LruOrder(4)
    order.add(ids())
    order.discard(ids())
    assert order.pop(0).tolist() == [] and order.first() == -1 and order.ids().tolist() == []


def test_the_order_against_a_list():
    rng = random.Random(3)
    for size in (1, 2, 7, 300):
        order, model = LruOrder(size), []
        for _ in range(1500):
            outside = [i for i in range(size) if i not in model] if size < 50 or rng.random() < 0.1 else []
            added = rng.sample(outside, rng.randint(0, len(outside)))
            order.add(ids(*added))
            model += added
            dropped = rng.sample(range(size), rng.randint(0, min(size, 8)))
            order.discard(ids(*dropped))
            model = [i for i in model if i not in dropped]
            assert order.first() == (model[0] if model else -1)
            count = rng.randint(0, min(len(model), 5))
            assert order.pop(count).tolist() == model[:count]
            del model[:count]
            assert order.ids().tolist() == model and len(order) == len(model)


def test_policies_by_name():
    assert isinstance(make_order("lru", 3), LruOrder)
    with pytest.raises(InvalidRequest, match="known: lru"):
        make_order("LRU", 3)


def test_numbers_of_namespaces_are_reused_after_the_last_user():
    spaces = Spaces()
    assert [spaces.enter(name) for name in (b"a", b"b", b"a")] == [0, 1, 0]
    spaces.add(1, 3)
    spaces.leave(0)
    assert (spaces.find(b"a"), spaces.users(0), spaces.users(1)) == (0, 1, 4)
    spaces.leave_each(np.array([1, 0, 1, 1], dtype=np.int32))
    assert (spaces.find(b"a"), spaces.find(b"b"), len(spaces)) == (-1, 1, 1)
    assert spaces.enter(b"c") == 0 and spaces.digest(0) == b"c"
