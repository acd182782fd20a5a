"""After the warm-up nothing is compiled any more, whatever a cache is asked for."""

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil
import numpy as np
import kvcore
from kvcore.cache import PrefixCache
from kvcore.eviction import POLICIES
from kvcore.hashing import PrefixHasher
from kvcore.lease import Prompt
from kvcore.namespace import Namespace
from kvcore.retention import Retention
from kvcore.warm_up import warm_up

def compiled():
    counts = {}
    for info in pkgutil.iter_modules(kvcore.__path__):
        for name, value in vars(importlib.import_module(f"kvcore.{info.name}")).items():
            if hasattr(value, "signatures"):
                counts[info.name, name] = len(value.signatures)
    return counts

warm_up()
before = compiled()
rng, space = np.random.default_rng(0), Namespace("m")
for policy in POLICIES:
    cache = PrefixCache(300, 4, PrefixHasher(b"s"), policy=policy)
    for turn in range(200):
        tokens = rng.integers(0, 3, 40).astype(np.int32)
        keep = (Retention(0, 8, turn % 100, 0.001),)
        one, two = cache.claim_many([Prompt(tokens, space, retention=keep), Prompt(tokens[:9], space)])
        cache.commit(one, 40)
        twin = cache.fork(one)
        cache.append(twin, tokens[:7])
        cache.truncate(twin, 41)
        cache.commit(twin, 41)
        for lease in (one, two, twin):
            cache.release(lease)
    cache.clear(space)
    cache.stats(), cache.snapshot(), cache.explain(tokens, space), cache.clear()
after = compiled()
new = {name: count for name, count in after.items() if count > before.get(name, 0)}
assert not new, new
"""


def test_nothing_is_compiled_afterwards():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
