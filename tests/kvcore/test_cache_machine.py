"""The cache against a naive twin, step by step, in tiny pools with every kind of trouble.

The twin keeps whole token prefixes in dictionaries and lists, so it is easy to believe. After every step the
cache must agree with it on what is published, in which order it would be evicted, and how many blocks are
free; it must pass its own `check`; and followers of its events must know exactly what it holds.
"""

import os
import random
from bisect import bisect_left
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvcore.cache import PrefixCache
from kvcore.errors import OutOfBlocks, StaleLease
from kvcore.events import EventLog, Residency
from kvcore.fingerprint import (
    CountingFilter,
    FilterGeometry,
    FingerprintFeed,
    FingerprintUpdate,
    column_digest,
)
from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace

SPACES = [Namespace("m"), Namespace("m", salt=""), Namespace("m", adapter="a", tenant="t")]
TEXTS = [[0] * 24, [0, 1, 2, 0, 1] * 5, [0, 0, 1, 1, 2, 2, 0, 0] * 3]
class Node:
    """A block of the twin: `key` is (namespace digest, all tokens up to its end) once published."""

    def __init__(self):
        self.key, self.refs, self.visible, self.dead = None, 1, False, False


class Sequence:
    def __init__(self, space, tokens):
        self.space, self.tokens = space, list(tokens)
        self.table, self.source = [], None
        self.computed = self.published = self.cached = 0
        self.publishing = True


class Twin:
    def __init__(self, num_blocks, size, hasher):
        self.size, self.hasher = size, hasher
        self.free = num_blocks
        self.nodes = {}  # key -> visible Node
        self.order = []  # idle visible Nodes, next victim first
        self.sequences = []

    def hash(self, key):
        digest, tokens = key
        root = self.hasher.root(next(ns for ns in SPACES if ns.digest() == digest))
        return int(self.hasher.block_hashes(np.array(tokens, dtype=np.int32), self.size, root)[-1])

    def find(self, space, tokens):
        """Nodes of the hit, the node to copy from, the number of its tokens."""
        size, most = self.size, len(tokens) - 1
        hit = []
        while (len(hit) + 1) * size <= most:
            node = self.nodes.get((space, tuple(tokens[: (len(hit) + 1) * size])))
            if node is None:
                break
            hit.append(node)
        start = len(hit) * size
        wanted = tuple(tokens[start : min(start + size, most)])
        prefix = tuple(tokens[:start])
        siblings = [k[1] for k in self.nodes if k[0] == space and k[1][:-size] == prefix]
        ends = sorted(tokens[start:] for tokens in siblings)
        best, common = None, 0
        at = bisect_left(ends, wanted)
        for end in ends[max(at - 1, 0) : at + 1]:
            same = 0
            while same < len(wanted) and end[same] == wanted[same]:
                same += 1
            if same > common:
                best, common = self.nodes[(space, prefix + end)], same
        assert common == max((self.common(end, wanted) for end in ends), default=0)
        return hit, best, common

    @staticmethod
    def common(end, wanted):
        return next((i for i, (a, b) in enumerate(zip(end, wanted, strict=False)) if a != b), len(wanted))

    def pin(self, node):
        node.refs += 1
        if node in self.order:
            self.order.remove(node)

    def unpin(self, node):
        node.refs -= 1
        if node.refs == 0:
            if node.visible:
                self.order.append(node)
            else:
                self.free += 1

    def take(self, count):
        for _ in range(count):
            if self.free:
                self.free -= 1
            else:
                victim = self.order.pop(0)
                children = [k for k in self.nodes if (k[0], k[1][: -self.size]) == victim.key]
                assert not children
                del self.nodes[victim.key]
        return [Node() for _ in range(count)]

    def claim(self, space, tokens, read, publish):
        hit, source, common = self.find(space, tokens) if read else ([], None, 0)
        need = -(-len(tokens) // self.size) - len(hit)
        available = self.free + sum(node not in hit for node in self.order)
        if source in self.order and need > available - 1:
            source, common = None, 0
        if need > available:
            raise OutOfBlocks(need, available)
        sequence = Sequence(space, tokens)
        for node in hit + [source] * (source is not None):
            self.pin(node)
        sequence.source = source
        sequence.table = hit + self.take(need)
        sequence.published, sequence.publishing = len(hit), publish
        sequence.cached = sequence.computed = len(hit) * self.size + common
        self.sequences.append(sequence)
        return sequence

    def append(self, sequence, tokens):
        need = -(-(len(sequence.tokens) + len(tokens)) // self.size) - len(sequence.table)
        if need > self.free + len(self.order):
            raise OutOfBlocks(need, self.free + len(self.order))
        sequence.table += self.take(need)
        sequence.tokens += tokens

    def end_copy(self, sequence):
        if sequence.source is not None:
            self.unpin(sequence.source)
            sequence.source = None

    def commit(self, sequence, computed):
        sequence.computed = computed
        self.end_copy(sequence)
        taken = {self.hash(key) for key in self.nodes}
        while sequence.publishing and (sequence.published + 1) * self.size <= computed:
            place = sequence.published
            key = (sequence.space, tuple(sequence.tokens[: (place + 1) * self.size]))
            own = sequence.table[place]
            if key in self.nodes:
                self.pin(self.nodes[key])
                sequence.table[place] = self.nodes[key]
                self.unpin(own)
            elif self.hash(key) in taken:
                sequence.publishing = False
                break
            else:
                own.key, own.visible = key, True
                self.nodes[key] = own
                taken.add(self.hash(key))
            sequence.published += 1

    def release(self, sequence):
        self.sequences.remove(sequence)
        self.end_copy(sequence)
        for node in reversed(sequence.table):
            self.unpin(node)

    def clear(self, space):
        for sequence in self.sequences:
            if space in (None, sequence.space):
                sequence.publishing = False
        for node in [n for k, n in self.nodes.items() if space in (None, k[0])]:
            del self.nodes[node.key]
            node.visible, node.dead = False, True
            if node in self.order:
                self.order.remove(node)
                self.free += 1
        held = {id(n): n for s in self.sequences for n in s.table + [s.source] * (s.source is not None)}
        return sum(node.dead and space in (None, node.key[0]) for node in held.values())


class Harness:
    """Does each thing to the cache and to its twin, and compares all that can be seen."""

    def __init__(self, num_blocks, size, bits, capacity):
        self.now = 0.0
        hasher = PrefixHasher(b"s", bits=bits)
        log = EventLog(5, capacity)
        self.cache = PrefixCache(num_blocks, size, hasher, clock=lambda: self.now, events=log)
        self.twin = Twin(num_blocks, size, hasher)
        self.live = []  # (Lease, Sequence, Namespace)
        self.ended = []  # (Namespace, tokens), latest first
        self.close, self.slow = Residency(), Residency()
        self.geometry = FilterGeometry.for_blocks(num_blocks * 64)
        self.feed = FingerprintFeed(self.cache, self.geometry)
        self.routers = [{"epoch": None, "seq": 0, "rows": set()} for _ in range(2)]
        self.seen = Counter()

    def claim(self, tokens, space, read, publish, bring_hashes, follow, pause):
        """The prompt is `tokens`, or goes on from the `follow`-th latest sequence, as a chat's next turn."""
        self.now += pause
        if follow < len(self.ended):
            space, before = self.ended[follow]
            tokens = before + tokens[:4]
        array, hashes = np.array(tokens, dtype=np.int32), None
        if bring_hashes:
            hasher = self.cache.hasher
            hashes = hasher.block_hashes(array, self.twin.size, hasher.root(space))
        hit, _, common = self.twin.find(space.digest(), tokens)
        assert self.cache.probe(array, space, hashes) == len(hit) * self.twin.size + common
        options = {"hashes": hashes, "read": read, "publish": publish}
        try:
            sequence = self.twin.claim(space.digest(), tokens, read, publish)
        except OutOfBlocks as expected:
            self.refused(expected, lambda: self.cache.claim(array, space, **options))
            return
        lease = self.cache.claim(array, space, **options)
        assert lease.cached_tokens == lease.computed == sequence.cached <= len(tokens) - 1
        assert (lease.copy is not None) == (sequence.source is not None)
        if lease.copy is not None:
            self.seen["partial hit"] += 1
            assert lease.copy.num_tokens == sequence.cached % self.twin.size
            assert lease.copy.dst == lease.blocks[sequence.cached // self.twin.size]
            assert self.key_of(lease.copy.src) == sequence.source.key
        self.live.append((lease, sequence, space))

    def refused(self, expected, call):
        self.seen["out of blocks"] += 1
        seq = self.cache.seq
        with pytest.raises(OutOfBlocks) as error:
            call()
        assert (error.value.needed, error.value.available) == (expected.needed, expected.available)
        assert self.cache.seq == seq

    def append(self, which, tokens):
        lease, sequence, _ = self.live[which % len(self.live)]
        array = np.array(tokens, dtype=np.int32)
        before = (lease.tokens.tolist(), lease.blocks.tolist())
        try:
            self.twin.append(sequence, tokens)
        except OutOfBlocks as expected:
            self.refused(expected, lambda: self.cache.append(lease, array))
            assert (lease.tokens.tolist(), lease.blocks.tolist()) == before
            return
        self.cache.append(lease, array)
        assert lease.tokens.tolist() == sequence.tokens

    def commit(self, which, left):
        lease, sequence, _ = self.live[which % len(self.live)]
        computed = max(len(sequence.tokens) - left, sequence.computed)
        self.twin.commit(sequence, computed)
        self.cache.commit(lease, computed)
        assert lease.published == sequence.published and lease.copy is None

    def release(self, which, times):
        lease, sequence, space = self.live.pop(which % len(self.live))
        self.ended = [(space, sequence.tokens), *self.ended[:4]]
        self.twin.release(sequence)
        for _ in range(times):
            self.cache.release(lease)
        with pytest.raises(StaleLease):
            self.cache.commit(lease, len(lease))

    def clear(self, space):
        held = self.cache.clear(space)
        assert held == self.twin.clear(space and space.digest())
        self.seen["cleared while held"] += held > 0

    def poll(self, which):
        if which == 2:
            self.follow(self.slow)
            return
        router = self.routers[which]
        update = self.feed.update_since(router["epoch"], router["seq"])
        if update is None:
            assert (router["epoch"], router["seq"]) == (self.cache.epoch, self.cache.seq)
            return
        update = FingerprintUpdate.decode(update.encode())
        rows, cleared = set(update.set_rows.tolist()), set(update.cleared_rows.tolist())
        if update.snapshot:
            router["rows"] = rows
        else:
            self.seen["delta"] += 1
            assert update.base_seq == router["seq"]
            assert not rows & router["rows"] and cleared <= router["rows"]
            router["rows"] = router["rows"] - cleared | rows
        router["epoch"], router["seq"] = update.epoch, update.seq
        assert (update.epoch, update.seq) == (self.cache.epoch, self.cache.seq)
        expected = CountingFilter(self.geometry)
        expected.add(self.cache.snapshot().hashes)
        assert sorted(router["rows"]) == expected.set_rows.tolist()
        assert update.digest == expected.digest == column_digest(expected.set_rows)

    def follow(self, follower):
        batch = self.cache.events_since(follower.epoch, follower.seq)
        if batch is None:
            self.seen["gap"] += follower.epoch is not None
            follower.load(self.cache.snapshot())
        else:
            for event in batch.events:
                follower.apply(event)
        expected = {}
        for key in self.twin.nodes:
            parent = (key[0], key[1][: -self.twin.size])
            expected[self.twin.hash(key)] = (key[0], self.twin.hash(parent) if parent[1] else None)
        assert follower.blocks == expected

    def key_of(self, block):
        pool, tokens = self.cache._pool, []
        while block >= 0:
            tokens = pool.tokens[block].tolist() + tokens
            block = int(pool.parents[block])
        return self.cache._resident.spaces.digest(-1 - block), tuple(tokens)

    def agree(self):
        self.cache.check()
        self.follow(self.close)
        stats, twin = self.cache.stats(), self.twin
        assert (stats.free, stats.cached) == (twin.free, len(twin.order))
        assert stats.free + stats.cached + stats.held == stats.num_blocks
        order = self.cache._order.ids().tolist()
        assert [self.key_of(block) for block in order] == [node.key for node in twin.order]

    def finish(self):
        while self.live:
            self.release(0, 1)
        self.agree()
        stats = self.cache.stats()
        assert stats.free + stats.cached == stats.num_blocks and stats.leases == 0
        self.seen.update(hits=stats.hit_tokens, evictions=stats.evictions, collisions=stats.collisions)
        self.seen.update(twins=stats.deduplicated)
        self.cache.clear()
        assert self.cache.stats().free == stats.num_blocks
        assert len(self.cache._resident.spaces) == 0
        self.cache.check()


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 16),
        size=st.integers(1, 4),
        bits=st.sampled_from([64, 1, 2, 3, 4]),
        capacity=st.sampled_from([1000, 12, 3]),
    )
    def start(self, num_blocks, size, bits, capacity):
        self.harness = Harness(num_blocks, size, bits, capacity)

    @rule(
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 20),
        own=st.lists(st.integers(0, 2), max_size=2),
        space=st.sampled_from(SPACES),
        read=st.sampled_from([True, True, False]),
        publish=st.sampled_from([True, True, False]),
        bring_hashes=st.booleans(),
        follow=st.integers(0, 9),
        then=st.sampled_from(["end", "commit", "hold"]),
    )
    def claim(self, text, length, own, then, **options):
        live = len(self.harness.live)
        self.harness.claim(text[:length] + own, pause=1, **options)
        if len(self.harness.live) > live and then != "hold":
            self.harness.agree()
            self.harness.commit(-1, 0)
            if then == "end":
                self.harness.agree()
                self.harness.release(-1, 1)
        self.harness.agree()

    @precondition(lambda self: self.harness.live)
    @rule(which=st.integers(0, 9), tokens=st.lists(st.integers(0, 2), max_size=5))
    def append(self, which, tokens):
        self.harness.append(which, tokens)
        self.harness.agree()

    @precondition(lambda self: self.harness.live)
    @rule(which=st.integers(0, 9), left=st.integers(0, 9), end=st.integers(0, 2))
    def commit(self, which, left, end):
        self.harness.commit(which, left)
        self.harness.agree()
        if end:
            self.harness.release(which, end)
            self.harness.agree()

    @rule(space=st.sampled_from([*SPACES, None]))
    def clear(self, space):
        self.harness.clear(space)
        self.harness.agree()

    @rule(which=st.integers(0, 2))
    def poll(self, which):
        self.harness.poll(which)

    def teardown(self):
        if hasattr(self, "harness"):
            self.harness.finish()


# More of both: KVCORE_EXAMPLES=5000 KVCORE_RANDOM_LIVES=3000 pytest tests/kvcore/test_cache_machine.py
EXAMPLES = int(os.environ.get("KVCORE_EXAMPLES", "200"))
CacheMachine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None)
TestCacheMachine = CacheMachine.TestCase


ACTIONS = ["claim", "append", "commit", "release", "poll", "clear"]


def random_life(seed, steps):
    """A long life with all kinds of trouble, in shares that a generator of examples seldom finds."""
    rng = random.Random(seed)
    bits, capacity = rng.choice([1, 2, 3, 4, 64, 64, 64, 64]), rng.choice([3, 20, 1000])
    harness = Harness(rng.randint(1, 24), rng.randint(1, 4), bits, capacity)
    for _ in range(steps):
        action = rng.choices(ACTIONS, [8, 4, 6, 5, 2, 0.2])[0]
        which = rng.randrange(100)
        if action == "claim":
            own = [rng.randint(0, 2) for _ in range(rng.randint(0, 4))]
            tokens = rng.choice(TEXTS)[: rng.randint(1, 20)] + own
            flags = [rng.random() < share for share in (0.9, 0.9, 0.5)]
            harness.claim(tokens, rng.choice(SPACES), *flags, follow=rng.randrange(12), pause=rng.random())
        elif action == "poll":
            harness.poll(which % 3)
        elif action == "clear":
            harness.clear(rng.choice([None, *SPACES]))
        elif harness.live and action == "append":
            harness.append(which, [rng.randint(0, 2) for _ in range(rng.randint(0, 5))])
        elif harness.live and action == "commit":
            harness.commit(which, rng.choice([0, 0, 0, 1, 3, 7]))
        elif harness.live and action == "release":
            harness.release(which, rng.randint(1, 2))
        harness.agree()
    harness.finish()
    return harness.seen


def test_long_random_lives():
    seen = Counter()
    for seed in range(int(os.environ.get("KVCORE_RANDOM_LIVES", "60"))):
        seen += random_life(seed, 150)
    kinds = ["hits", "partial hit", "evictions", "collisions", "twins", "out of blocks", "gap", "delta"]
    assert min(seen[kind] for kind in [*kinds, "cleared while held"]) > 20, seen
