"""Does each thing to a cache and to its naive twin, and compares all that can be seen.

That is what is published, in which order it would be evicted, which sequences share which blocks, and every
counter. The cache must pass its own `check`, and followers of its events must know exactly what it holds.
A pretended device, whose KV names the prefix it is of, must hold the right KV in every computed place of
every sequence.
"""

from collections import Counter
from itertools import accumulate, islice

import numpy as np
import pytest

from kvcore.cache import PrefixCache
from kvcore.errors import OutOfBlocks, StaleLease
from kvcore.events import EventLog
from kvcore.fingerprint import (
    CountingFilter,
    FilterGeometry,
    FingerprintUpdate,
    column_digest,
)
from kvcore.hashing import PrefixHasher
from kvcore.lease import Prompt
from kvcore.namespace import Namespace
from kvcore.retention import Retention
from replica.fingerprint_feed import FingerprintFeed

SPACES = [Namespace("m"), Namespace("m", salt=""), Namespace("m", adapter="a", tenant="t")]


def ids(tokens):
    return np.array(tokens, dtype=np.int32)


class Harness:
    """Does each thing to the cache and to its twin, and compares all that can be seen."""

    def __init__(self, tools, num_blocks, size, bits, capacity, policy):
        self.oracle, residency, self.victims = tools
        self.now, self.size, self.bits, self.policy = 0.0, size, bits, policy
        hasher = PrefixHasher(b"s", bits=bits)
        roots, known = {space.digest(): hasher.root(space) for space in SPACES}, {}

        def hash_of(space, tokens):
            if (space, tokens) not in known:
                known[space, tokens] = int(hasher.block_hashes(ids(tokens), size, roots[space])[-1])
            return known[space, tokens]

        log = EventLog(5, capacity)
        self.cache = PrefixCache(num_blocks, size, hasher, policy=policy, clock=lambda: self.now, events=log)
        ghosts = len(self.cache._state.pool.ghosts)
        self.twin = self.oracle.Twin(num_blocks, size, policy, lambda: self.now, hash_of, ghosts)
        self.device = [[None] * size for _ in range(num_blocks)]
        self.live = []  # (Lease, Sequence, Namespace)
        self.ended = []  # (Namespace, tokens), latest first
        self.close, self.slow = residency(), residency()
        self.geometry = FilterGeometry.for_blocks(num_blocks * 64)
        self.feed = FingerprintFeed(self.cache, self.geometry)
        self.routers = [{"epoch": None, "seq": 0, "rows": set()} for _ in range(2)]
        self.seen = Counter()

    # --- The steps ---

    def prepared(self, tokens, space, read, publish, bring_hashes, follow, ranges):
        """A prompt for the cache and a sequence for the twin: of `tokens`, or the `follow`-th latest
        sequence and what it goes on with, as a chat's next turn."""
        if follow < len(self.ended):
            space, before = self.ended[follow]
            tokens = before + tokens[:4]
        hashes, hasher = None, self.cache.hasher
        if bring_hashes:
            hashes = hasher.block_hashes(ids(tokens), self.size, hasher.root(space))
        prompt = Prompt(ids(tokens), space, hashes, read, publish, tuple(Retention(*part) for part in ranges))
        return prompt, self.oracle.Sequence(space.digest(), tokens, read, publish, ranges)

    def claim(self, **options):
        prompt, sequence = self.prepared(**options)
        hit, _, common = self.twin.find(sequence.space, sequence.tokens)
        probed = self.cache.probe(prompt.tokens, prompt.namespace, prompt.hashes)
        assert probed == len(hit) * self.size + common
        names = {name: getattr(prompt, name) for name in ("hashes", "read", "publish", "retention")}
        self.twin.pin(sequence)
        try:
            self.twin.admit(sequence)
        except OutOfBlocks as expected:
            self.refused(expected, lambda: self.cache.claim(prompt.tokens, prompt.namespace, **names))
            return
        self.claimed(self.cache.claim(prompt.tokens, prompt.namespace, **names), sequence, prompt.namespace)

    def claim_many(self, batch):
        pairs = [self.prepared(**options) for options in batch]
        for _, sequence in pairs:
            self.twin.pin(sequence)
        leases = self.cache.claim_many([prompt for prompt, _ in pairs])
        for lease, (prompt, sequence) in zip(leases, pairs, strict=True):
            try:
                self.twin.admit(sequence)
            except OutOfBlocks:
                assert lease is None
                self.seen["refused in a batch"] += 1
                continue
            self.claimed(lease, sequence, prompt.namespace)

    def claimed(self, lease, sequence, space):
        assert lease.cached_tokens == lease.computed == sequence.cached <= len(lease) - 1
        if lease.copy is not None:
            self.seen["partial hit"] += 1
            assert lease.copy.num_tokens == sequence.common
            assert lease.copy.dst == lease.blocks[sequence.cached // self.size]
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
        before, had_copy = (lease.tokens.tolist(), lease.blocks.tolist()), lease.copy
        try:
            self.twin.append(sequence, tokens)
        except OutOfBlocks as expected:
            self.refused(expected, lambda: self.cache.append(lease, ids(tokens)))
            assert (lease.tokens.tolist(), lease.blocks.tolist()) == before
            return
        self.cache.append(lease, ids(tokens))
        self.seen["copy on write"] += lease.copy != had_copy
        assert lease.tokens.tolist() == sequence.tokens

    def settle(self, which, back, tokens):
        lease, sequence, _ = self.live[which % len(self.live)]
        start = max(len(lease) - back, sequence.computed)
        tokens = tokens[: len(lease) - start]
        self.seen["settled"] += bool(tokens)
        sequence.tokens[start : start + len(tokens)] = tokens
        self.cache.settle(lease, start, ids(tokens))
        assert lease.tokens.tolist() == sequence.tokens

    @staticmethod
    def kv_of(sequence, count):
        """What stands for the KV of the first `count` tokens: each depends on all before it."""
        tokens = sequence.tokens[:count]
        every = accumulate(tokens, lambda kv, token: hash((kv, token)), initial=sequence.space)
        return islice(every, 1, None)

    def do_copy(self, lease):
        """What an engine does before it computes, here as late as it may."""
        if lease.copy is not None:
            count = lease.copy.num_tokens
            self.device[lease.copy.dst][:count] = self.device[lease.copy.src][:count]

    def commit(self, which, left):
        lease, sequence, _ = self.live[which % len(self.live)]
        computed = max(len(sequence.tokens) - left, sequence.computed)
        self.do_copy(lease)
        for i, kv in enumerate(self.kv_of(sequence, computed)):
            if i >= sequence.computed:
                self.device[lease.blocks[i // self.size]][i % self.size] = kv
        if self.policy == "fifo":
            self.now += 1.0  # storing times are float32, too coarse for a clock that stands still
        self.twin.commit(sequence, computed)
        self.cache.commit(lease, computed)
        assert lease.published == sequence.published and lease.copy is None

    def fork(self, which):
        lease, sequence, space = self.live[which % len(self.live)]
        if lease.copy is None and len(self.live) < 12:
            self.seen["forks"] += 1
            self.live.append((self.cache.fork(lease), self.twin.fork(sequence), space))

    def truncate(self, which, left):
        lease, sequence, _ = self.live[which % len(self.live)]
        if len(lease):
            length = max(len(lease) - left, 1)
            self.seen["truncated what is published"] += length < sequence.published * self.size
            self.do_copy(lease)
            self.twin.truncate(sequence, length)
            self.cache.truncate(lease, length)
            assert lease.tokens.tolist() == sequence.tokens and lease.computed == sequence.computed

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

    def explain(self, tokens, space):
        if self.bits == 64:  # collisions may give it wrong reasons, never a wrong hit
            found = self.cache.explain(ids(tokens), space)
            expected = self.twin.explain(space.digest(), tokens)
            assert (found.hit_tokens, found.reason, found.evicted_s_ago) == expected
            self.seen["why: " + found.reason] += 1

    # --- The followers ---

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
            parent = (key[0], key[1][: -self.size])
            expected[self.twin.hash(key)] = (key[0], self.twin.hash(parent) if parent[1] else None)
        assert follower.blocks == expected

    # --- Agreement ---

    def key_of(self, block):
        pool, tokens = self.cache._state.pool, []
        while block >= 0:
            tokens = pool.tokens[block].tolist() + tokens
            block = int(pool.blocks["parent"][block])
        return self.cache._state.spaces.digest(-1 - block), tuple(tokens)

    def agree(self):
        self.cache.check()
        self.follow(self.close)
        stats, twin = self.cache.stats(), self.twin
        twin.expire(self.now)
        assert (stats.free, stats.cached, stats.published) == (twin.free, len(twin.idle()), len(twin.nodes))
        assert stats.free + stats.cached + stats.held == stats.num_blocks
        assert {name: getattr(stats, name) for name in twin.counts} == twin.counts
        for name, total in twin.sums.items():
            assert getattr(stats, name) == pytest.approx(total, rel=1e-6, abs=1e-6), name
        order, expected = [self.key_of(block) for block in self.victims(self.cache)], twin.order()
        assert order == [node.key for node in expected]
        age = max(round(self.now - expected[0].used_at, 6), 0.0) if expected else None
        assert stats.eviction_age_s == age
        self.agree_on_tables()

    def agree_on_tables(self):
        node_of, block_of = {}, {}
        for lease, sequence, _ in self.live:
            pairs = [*zip(lease.blocks.tolist(), sequence.table, strict=True)]
            assert (lease.copy is None) == (sequence.source is None)
            if lease.copy is not None:
                pairs.append((lease.copy.src, sequence.source))
            for block, node in pairs:
                assert node_of.setdefault(block, node) is node and block_of.setdefault(node, block) == block
            copied = lease.computed - (lease.copy.num_tokens if lease.copy else 0)
            for i, kv in enumerate(self.kv_of(sequence, copied)):
                assert self.device[lease.blocks[i // self.size]][i % self.size] == kv

    def finish(self):
        while self.live:
            self.release(0, 1)
        self.agree()
        stats = self.cache.stats()
        assert stats.free + stats.cached == stats.num_blocks and stats.leases == 0
        self.seen.update(hits=stats.hit_tokens, evictions=stats.evictions, collisions=stats.collisions)
        self.seen.update(twins=stats.deduplicated, regrets=stats.regrets)
        self.cache.clear()
        assert self.cache.stats().free == stats.num_blocks
        assert len(self.cache._state.spaces) == 0
        self.cache.check()
