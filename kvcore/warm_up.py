"""Compiling before the first request: a short life of a tiny cache that passes every compiled function."""

import contextlib

import numpy as np

from kvcore.cache import PrefixCache
from kvcore.errors import OutOfBlocks
from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace
from kvcore.retention import Retention


def warm_up() -> None:
    """Compile what caches and hashers use, or load it from disk: about 10 s once, then 0.3 s a process."""
    cache = PrefixCache(200, 2, PrefixHasher(b"warm up"), policy="reuse")
    tokens, space = np.arange(5, dtype=np.int32), Namespace("warm up")
    lease = cache.claim(tokens, space, retention=[Retention(0, None, 50, 1e-9)])
    cache.commit(lease, len(tokens))
    twin = cache.fork(lease)
    cache.append(twin, tokens)
    cache.truncate(twin, 7)
    with contextlib.suppress(OutOfBlocks):
        cache.claim(np.arange(1000, dtype=np.int32), space)
    for held in (lease, twin, cache.claim(tokens, space)):
        cache.release(held)
    for salt in range(200):  # the heaps grow, and blocks are evicted
        lease = cache.claim(tokens[:3], Namespace("warm up", salt=salt))
        cache.commit(lease, 3)
        cache.release(lease)
    cache.probe(tokens, space)
    cache.explain(tokens, space)
    cache.stats()
    cache.snapshot()
    cache.clear()
