"""Many threads on one cache: no block lost or given twice, no wrong KV, and probes that wait for nobody.

Each thread writes KV that names its prefix to a pretended device and reads it back from every block that it
holds: a block that two sequences believed to be theirs would be seen at once.
"""

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import pytest

from kvcore.errors import OutOfBlocks
from kvcore.lease import Prompt
from kvcore.namespace import Namespace
from kvcore.retention import Retention

BLOCKS, SIZE = 96, 4
SPACES = [Namespace("m"), *(Namespace("m", salt=salt) for salt in range(20))]
STEMS = [[stem] * 12 + [7] * 24 for stem in range(3)]


def kv_of(lease, count):
    """int64[count]: what stands for the KV of the first tokens of a sequence."""
    start = hash(lease.namespace.digest())
    return list(accumulate(lease.tokens[:count].tolist(), lambda kv, t: hash((kv, t)), initial=start))[1:]


class Worker:
    """One engine thread with its own sequences; the device and the cache are everybody's."""

    def __init__(self, cache, device, seed):
        self.cache, self.device, self.rng = cache, device, random.Random(seed)
        self.live = []

    def run(self, rounds):
        steps = [self.claim, self.claim, self.claim_many, self.grow, self.grow, self.fork, self.truncate]
        steps += [self.end, self.end, self.look]
        for round_ in range(rounds):
            self.rng.choice(steps)()
            if len(self.live) > 3:
                self.end()
            if round_ % 50 == 49:
                self.cache.check()
                self.cache.clear(self.rng.choice([*SPACES[:2], None]))
        while self.live:
            self.end()

    def prompt(self):
        tokens = [*self.rng.choice(STEMS)[: self.rng.randint(1, 30)], self.rng.randrange(3)]
        space = SPACES[0] if self.rng.random() < 0.7 else self.rng.choice(SPACES)
        keep = (Retention(0, 8, self.rng.randrange(101), 0.01),) if self.rng.random() < 0.2 else ()
        return Prompt(np.array(tokens, dtype=np.int32), space, None, self.rng.random() < 0.9, True, keep)

    def slots(self, lease, start, end):
        places = np.arange(start, end)
        return lease.blocks[places // SIZE], places % SIZE

    def verify(self, lease):
        assert self.device[self.slots(lease, 0, lease.computed)].tolist() == kv_of(lease, lease.computed)

    def copy(self, lease):
        if lease.copy is not None:
            count = lease.copy.num_tokens
            self.device[lease.copy.dst, :count] = self.device[lease.copy.src, :count]

    def compute(self, lease, end):
        self.copy(lease)
        start = lease.computed
        self.device[self.slots(lease, start, end)] = kv_of(lease, end)[start:]
        self.verify(lease)
        self.cache.commit(lease, end)
        self.verify(lease)

    def admitted(self, lease):
        self.live.append(lease)
        self.copy(lease)
        self.verify(lease)
        self.compute(lease, self.rng.randint(lease.computed, len(lease)))

    def claim(self):
        try:
            p = self.prompt()
            lease = self.cache.claim(p.tokens, p.namespace, read=p.read, retention=p.retention)
        except OutOfBlocks:
            return
        self.admitted(lease)

    def claim_many(self):
        for lease in self.cache.claim_many([self.prompt() for _ in range(3)]):
            if lease is not None:
                self.admitted(lease)

    def grow(self):
        if self.live:
            lease = self.rng.choice(self.live)
            try:
                self.cache.append(lease, np.array(self.rng.choices(range(3), k=3), dtype=np.int32))
            except OutOfBlocks:
                return
            self.compute(lease, len(lease))

    def fork(self):
        if self.live:
            self.live.append(self.cache.fork(self.rng.choice(self.live)))
            self.verify(self.live[-1])
            self.grow()

    def truncate(self):
        if self.live:
            lease = self.rng.choice(self.live)
            if len(lease):
                self.cache.truncate(lease, self.rng.randint(1, len(lease)))
                self.verify(lease)

    def end(self):
        if self.live:
            lease = self.live.pop(self.rng.randrange(len(self.live)))
            self.verify(lease)
            for _ in range(self.rng.randint(1, 2)):
                self.cache.release(lease)

    def look(self):
        prompt = self.prompt()
        assert 0 <= self.cache.probe(prompt.tokens, prompt.namespace) < len(prompt.tokens)
        found = self.cache.explain(prompt.tokens, prompt.namespace)
        assert 0 <= found.hit_tokens < len(prompt.tokens)
        stats = self.cache.stats()
        assert stats.free + stats.cached + stats.held == BLOCKS


def follow(cache, follower):
    batch = cache.events_since(follower.epoch, follower.seq)
    if batch is None:
        follower.load(cache.snapshot())
    else:
        for event in batch.events:
            follower.apply(event)


@pytest.fixture
def quick_switches():
    """Threads take turns every 20 µs instead of every 5 ms."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.parametrize("policy", ["reuse", "lfu"])
def test_eight_threads(make_cache, residency, quick_switches, policy):
    cache = make_cache(num_blocks=BLOCKS, block_size=SIZE, policy=policy)
    device, follower = np.zeros((BLOCKS, SIZE), dtype=np.int64), residency()
    with ThreadPoolExecutor(8) as pool:
        workers = [pool.submit(Worker(cache, device, seed).run, 400) for seed in range(8)]
        while not all(worker.done() for worker in workers):
            follow(cache, follower)
        for worker in workers:
            worker.result()
    cache.check()
    stats = cache.stats()
    assert (stats.held, stats.leases, stats.free + stats.cached) == (0, 0, BLOCKS)
    assert min(stats.claims, stats.evictions, stats.forks, stats.cleared, stats.hit_tokens) > 20
    follow(cache, follower)
    now = residency()
    now.load(cache.snapshot())
    assert follower == now and len(now.blocks) == stats.published == stats.cached
    assert cache.clear() == 0 and cache.stats().free == BLOCKS
    assert len(cache._state.spaces) == 0


def test_a_probe_takes_no_lock(cache, ns, run):
    run(cache, range(8), ns)
    prompt = np.arange(9, dtype=np.int32)
    with ThreadPoolExecutor(1) as pool, cache._lock:
        assert pool.submit(cache.probe, prompt, ns).result(timeout=60) == 8


def test_everything_else_takes_turns(cache, ns, run):
    lease = run(cache, range(8), ns)
    prompt, done = np.arange(9, dtype=np.int32), []
    calls = {
        "claim": lambda: cache.claim(prompt, ns),
        "claim_many": lambda: cache.claim_many([Prompt(prompt, ns)]),
        "release": lambda: cache.release(lease),
        "clear": cache.clear,
        "snapshot": cache.snapshot,
        "events_since": lambda: cache.events_since(None, 0),
        "stats": cache.stats,
    }

    def go(call):
        call()
        done.append(call)

    threads = [threading.Thread(target=go, args=[call], daemon=True) for call in calls.values()]
    with cache._lock:
        for thread in threads:
            thread.start()
        assert cache.probe(prompt, ns) == 8 and done == [], "all of them wait"
    for thread in threads:
        thread.join(timeout=60)
    assert len(done) == len(calls)
    cache.check()
