"""Arrays of every kind are taken for what they hold, and none makes the compiled functions compile again.

A new specialisation would hold up a request for seconds.
"""

import importlib
import pkgutil

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

import kvcore
from kvcore import match
from kvcore.lease import Prompt
from kvcore.namespace import Namespace

PROMPT = list(range(18))


def plain(values, dtype):
    return np.array(values, dtype=dtype)


def readonly(values, dtype):
    array = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array


def strided(values, dtype):
    return np.repeat(np.array(values, dtype=dtype), 2)[::2]


def reversed_(values, dtype):
    return np.array(values[::-1], dtype=dtype)[::-1]


def column(values, dtype):
    return np.array([values, values], dtype=dtype).T[:, 1]


def unaligned(values, dtype):
    data = bytearray(b"x" + np.array(values, dtype=dtype).tobytes())
    return np.frombuffer(data, dtype=dtype, offset=1)


def from_bytes(values, dtype):
    return np.frombuffer(np.array(values, dtype=dtype).tobytes(), dtype=dtype)


KINDS = [plain, readonly, strided, reversed_, column, unaligned, from_bytes]
DTYPES = ["<i4", ">i4", "<i8", "<u2", "u1"]


def compiled():
    """How many specialisations each compiled function has."""
    counts = {}
    for info in pkgutil.iter_modules(kvcore.__path__):
        for name, value in vars(importlib.import_module(f"kvcore.{info.name}")).items():
            if isinstance(value, Dispatcher):
                counts[f"{value.__module__}.{name}"] = len(value.signatures)
    return counts


def go_through(cache, ns, tokens, hashes):
    """Every method that takes arrays; returns what it found."""
    lease = cache.claim(tokens[:9], ns, hashes=hashes)
    cache.append(lease, tokens[9:16])
    cache.commit(lease, 16)
    fork = cache.fork(lease)
    cache.append(fork, tokens[16:])
    cache.truncate(fork, 15)
    cache.append(fork, tokens[:1])
    cache.release(fork)
    cache.release(lease)
    other = cache.claim_many([Prompt(tokens, ns, None), Prompt(tokens, ns, hashes)])
    found = [cache.probe(tokens, ns), cache.probe(tokens, ns, hashes), cache.explain(tokens, ns).hit_tokens]
    found += [lease.tokens.tolist(), lease.hashes.tolist(), [claimed.cached_tokens for claimed in other]]
    found.append(cache.hasher.block_hashes(tokens, 4, cache.hasher.root(ns)).tolist())
    for claimed in other:
        cache.release(claimed)
    cache.check()
    return found


@pytest.fixture
def expected(make_cache, ns):
    """What plain arrays give; afterwards all is compiled that will be."""
    cache = make_cache(num_blocks=16)
    tokens = plain(PROMPT, "<i4")
    hashes = cache.hasher.block_hashes(tokens, 4, cache.hasher.root(ns))
    return go_through(cache, ns, tokens, hashes), hashes.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_and_compiles_nothing(make_cache, ns, expected, kind):
    found, hashes = expected
    before = compiled()
    for dtype in DTYPES:
        assert go_through(make_cache(num_blocks=16), ns, kind(PROMPT, dtype), kind(hashes, "<u8")) == found
    assert compiled() == before
    assert len(match.find.signatures) == 1


def test_lists_and_memory_maps(make_cache, ns, expected, tmp_path):
    found, hashes = expected
    before = compiled()
    maps = []
    for name, values, dtype in (("tokens", PROMPT, "<i4"), ("hashes", hashes, "<u8")):
        plain(values, dtype).tofile(tmp_path / name)
        maps.append(np.memmap(tmp_path / name, dtype=dtype, mode="r"))
    assert go_through(make_cache(num_blocks=16), ns, *maps) == found
    assert go_through(make_cache(num_blocks=16), ns, PROMPT, plain(hashes, "<u8")) == found
    assert compiled() == before


def test_growth_compiles_nothing(make_cache, ns, run, expected):
    before = compiled()
    cache = make_cache(num_blocks=400, block_size=1)
    for salt in range(100):
        run(cache, [1, 2, 3], Namespace("m", salt=salt))
    assert len(cache._state.pool.spaces) == 128 and cache._state.pool.heaps.shape[1] > 64
    assert all(count <= max(before[name], 1) for name, count in compiled().items())
