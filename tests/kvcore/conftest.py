"""A tiny cache with a clock that the test turns, and prompts that are easy to read."""

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvcore import eviction
from kvcore.cache import PrefixCache
from kvcore.errors import InvalidRequest
from kvcore.events import BlocksRemoved, Cleared
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


@dataclass
class Residency:
    """A consumer's copy of what one cache holds: `blocks` maps a hash to (namespace digest, parent hash)."""

    epoch: int | None = None
    seq: int = 0
    blocks: dict[int, tuple[bytes, int | None]] = field(default_factory=dict)

    def load(self, snapshot):
        """Replace everything by a snapshot."""
        hashes = snapshot.hashes.tolist()
        parents, owners = snapshot.parents.tolist(), snapshot.owners.tolist()
        self.epoch, self.seq, self.blocks = snapshot.epoch, snapshot.seq, {}
        for key, parent, owner in zip(hashes, parents, owners, strict=True):
            self.blocks[key] = (snapshot.namespaces[owner], None if parent < 0 else hashes[parent])

    def apply(self, event):
        """Apply the next event. Raises `InvalidRequest` when it is not the next one."""
        if event.seq != self.seq + 1:
            raise InvalidRequest(f"event {event.seq} does not follow {self.seq}")
        self.seq = event.seq
        if isinstance(event, Cleared):
            self.blocks.clear()
        elif isinstance(event, BlocksRemoved):
            for key in event.hashes.tolist():
                del self.blocks[key]
        else:
            parent = event.parent
            for key in event.hashes.tolist():
                self.blocks[key] = (event.namespace, parent)
                parent = key


@pytest.fixture(scope="session")
def residency():
    return Residency


def next_victims(cache):
    """All idle blocks in the order in which they would be evicted, found out on a copy."""
    pool = type(cache._state.pool)(*(array.copy() for array in cache._state.pool))
    idle = int(pool.state["idle"][0])
    pool = eviction.roomy(pool, idle)
    return [eviction.evict(pool, 1e9) for _ in range(idle)]


@pytest.fixture(scope="session")
def victims():
    return next_victims


def load(name):
    """A helper module beside this file: tests are imported one by one, so they cannot import each other."""
    spec = importlib.util.spec_from_file_location(f"kvcore_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def make_harness():
    """A cache and its naive twin, side by side: see `harness.py` and `twin.py`."""
    harness, tools = load("harness"), (load("twin"), Residency, next_victims)
    return lambda *args, **options: harness.Harness(tools, *args, **options)
