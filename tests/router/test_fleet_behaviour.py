"""How the policies behave on a simulated fleet: a small event simulation with chunked prefill and LRU caches.

A replica steps like an engine does: each step carries one token of every running request and a chunk of the
oldest prompt. Caches hold block hashes only; fingerprints, reports and the clock are the real thing's.
"""

import heapq
import itertools
import random
import statistics
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from kvcore.fingerprint import CountingFilter, FilterGeometry, FingerprintUpdate
from router.placement import Placement

BLOCK = 16


@dataclass(eq=False)
class Prompt:
    hashes: np.ndarray
    num_tokens: int
    output: int = 16
    arrival: float = 0.0
    replica: str = ""
    cached: int = 0
    left: int = 0  # prompt tokens still to compute
    made: int = 0  # output tokens
    ttft: float = 0.0
    done: Callable[["Prompt"], None] | None = None
    placed: object = None


class Replica:
    """Prefix cache (leaf-first LRU), first-come-first-served chunked prefill, decode in every step."""

    def __init__(self, fleet, name, blocks, rate, step_s, chunk):
        self.fleet, self.name, self.blocks = fleet, name, blocks
        self.rate, self.step_s, self.chunk = rate, step_s, chunk
        self.cache: OrderedDict[int, float] = OrderedDict()
        self.filter = CountingFilter(FilterGeometry.for_blocks(blocks))
        self.rows = np.arange(self.filter.geometry.rows)
        self.published = self.filter.bits_at(self.rows)
        self.seq = self.published_seq = 0
        self.waiting: deque[Prompt] = deque()
        self.running: list[Prompt] = []
        self.busy = False
        self.computed = 0

    def arrive(self, prompt):
        prompt.left = -1
        self.waiting.append(prompt)
        self.wake()

    def wake(self):
        if not self.busy and (self.waiting or self.running):
            self.busy = True
            budget, chunks = self.chunk - len(self.running), []
            for prompt in self.waiting:
                if budget <= 0:
                    break
                if prompt.left < 0:
                    if any(self.shares_unfinished(prompt, other) for other, _ in chunks):
                        break  # its next block is being computed for another: wait for that
                    prompt.cached = min(self.hit(prompt.hashes) * BLOCK, prompt.num_tokens - 1)
                    prompt.left = prompt.num_tokens - prompt.cached
                count = min(budget, prompt.left)
                budget -= count
                chunks.append((prompt, count))
            tokens = sum(count for _, count in chunks)
            time_s = tokens / self.rate + self.step_s * len(self.running)
            self.fleet.at(self.fleet.now + time_s, lambda: self.stepped(chunks))

    def stepped(self, chunks):
        self.busy = False
        for prompt in list(self.running):
            prompt.made += 1
        for prompt, count in chunks:
            prompt.left -= count
            self.computed += count
            if prompt.left == 0:
                self.waiting.remove(prompt)
                self.store(prompt.hashes)
                self.running.append(prompt)
                self.fleet.started(self, prompt)
        for prompt in [p for p in self.running if p.made >= p.output]:
            self.running.remove(prompt)
            self.fleet.finished(prompt)
        self.wake()

    def shares_unfinished(self, prompt, other):
        missing = next((i for i, h in enumerate(prompt.hashes.tolist()) if h not in self.cache), None)
        if missing is None or missing >= len(other.hashes):
            return False
        return prompt.hashes[missing] == other.hashes[missing]

    def hit(self, hashes):
        depth = next((d for d, h in enumerate(hashes.tolist()) if h not in self.cache), len(hashes))
        for h in reversed(hashes[:depth].tolist()):
            self.cache[h] = self.fleet.now
            self.cache.move_to_end(h)
        return depth

    def store(self, hashes):
        new = [h for h in hashes.tolist() if h not in self.cache]
        for h in reversed(hashes.tolist()):
            self.cache[h] = self.fleet.now
            self.cache.move_to_end(h)
        old = [self.cache.popitem(last=False)[0] for _ in range(max(0, len(self.cache) - self.blocks))]
        self.filter.add(np.array(new, dtype=np.uint64))
        self.filter.remove(np.array(old, dtype=np.uint64))
        self.seq += 1

    def poll(self, snapshot=False):
        update = None
        if snapshot or self.seq != self.published_seq:
            bits = self.filter.bits_at(self.rows)
            before = np.zeros_like(bits) if snapshot else self.published
            rows = np.flatnonzero(bits != before).astype(np.uint32)
            update = FingerprintUpdate(
                1, self.published_seq, self.seq, self.filter.geometry, snapshot,
                rows[bits[rows]], self.filter.digest, rows[~bits[rows]],
            )  # fmt: skip
            self.published, self.published_seq = bits, self.seq
        tokens = sum(p.num_tokens if p.left < 0 else p.left for p in self.waiting)
        victim = next(iter(self.cache.values()), None)
        load = {
            "waiting": len(self.waiting), "running": len(self.running), "waiting_tokens": tokens,
            "free": self.blocks - len(self.cache), "cached": len(self.cache), "held": 0,
            "num_blocks": self.blocks,
            "eviction_age_s": None if victim is None else self.fleet.now - victim,
            "prefill_tokens_per_s": self.rate, "decode_step_s": self.step_s,
        }  # fmt: skip
        return update, load


class Fleet:
    def __init__(self, policy, count=8, *, blocks=4000, rate=8000.0, step_s=0.002, chunk=512, sync_s=0.05,
                 seed=0, rates=None):  # fmt: skip
        self.now = 0.0
        self._events: list = []
        self._order = itertools.count()
        self.placement = Placement(
            policy, block_size=BLOCK, clock=lambda: self.now, rng=random.Random(seed),
            max_inflight_per_replica=10**6,
        )  # fmt: skip
        rates = rates or [rate] * count
        names = [f"r{i}" for i in range(count)]
        self.replicas = {
            name: Replica(self, name, blocks, rate, step_s, chunk)
            for name, rate in zip(names, rates, strict=True)
        }
        self.results: list[Prompt] = []
        self.open = 0
        for i, replica in enumerate(self.replicas.values()):
            self.placement.join(replica.name)
            self.placement.update(replica.name, *replica.poll(snapshot=True))
            self.at(sync_s * (i + 1) / count, lambda r=replica: self.sync(r, sync_s))

    def at(self, time, action):
        heapq.heappush(self._events, (time, next(self._order), action))

    def sync(self, replica, every):
        assert self.placement.update(replica.name, *replica.poll())
        if self.open:
            self.at(self.now + every, lambda: self.sync(replica, every))

    def submit(self, time, prompt):
        self.open += 1
        self.at(time, lambda: self._arrive(prompt))

    def _arrive(self, prompt):
        prompt.arrival = self.now
        prompt.placed = self.placement.place(prompt.hashes, prompt.num_tokens)
        prompt.replica = prompt.placed.replica_id
        self.replicas[prompt.replica].arrive(prompt)

    def started(self, replica, prompt):
        prompt.ttft = self.now - prompt.arrival
        chunk = {"replica": replica.name, "cached_tokens": prompt.cached, "epoch": 1, "seq": replica.seq}
        self.placement.on_start(prompt.placed, chunk)

    def finished(self, prompt):
        self.placement.finish(prompt.placed.reservation)
        self.results.append(prompt)
        self.open -= 1
        if prompt.done:
            prompt.done(prompt)

    def run(self):
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
        assert self.open == 0
        assert all(not any(figures.values()) for figures in self.placement.stats().values())
        return self

    @property
    def hit_rate(self):
        return sum(p.cached for p in self.results) / sum(p.num_tokens for p in self.results)

    @property
    def ttft(self):
        return statistics.fmean(p.ttft for p in self.results)

    @property
    def shares(self):
        return Counter({name: 0 for name in self.replicas}) + Counter(p.replica for p in self.results)


def hashes_of(*parts):
    """Prefix hashes of a prompt made of (name, blocks) parts."""
    drawn = [np.random.default_rng(name).integers(0, 1 << 64, n, dtype=np.uint64) for name, n in parts]
    return np.bitwise_xor.accumulate(np.concatenate(drawn))


def prompt_of(*parts, output=16, extra=3):
    hashes = hashes_of(*parts)
    return Prompt(hashes, BLOCK * len(hashes) + extra, output=output)


def open_loop(policy, prompts, rate_per_s, **fleet):
    """Poisson arrivals."""
    fleet = Fleet(policy, **fleet)
    rng, time = random.Random(7), 0.0
    for prompt in prompts:
        time += rng.expovariate(rate_per_s)
        fleet.submit(time, prompt)
    return fleet.run()


def closed_loop(policy, chats, clients, **fleet):
    """Each client plays whole chats (lists of prompts), one turn after the other."""
    fleet, queue = Fleet(policy, **fleet), iter(chats)

    def turn(chat, time):
        prompt = next(chat, None)
        if prompt is not None:
            prompt.done = lambda _: turn(chat, fleet.now)
            fleet.submit(time, prompt)
        else:
            begin(time)

    def begin(time):
        chat = next(queue, None)
        if chat is not None:
            turn(iter(chat), time)

    for client in range(clients):
        begin(0.1 * client)
    return fleet.run()


def ideal_hit_rate(prompts):
    """Of one infinite cache that serves the prompts one by one."""
    seen, hit = set(), 0
    for prompt in prompts:
        keys = prompt.hashes.tolist()
        hit += BLOCK * next((d for d, key in enumerate(keys) if key not in seen), len(keys))
        seen.update(keys)
    return hit / sum(prompt.num_tokens for prompt in prompts)


def chats(seed, count=40):
    """Tenants with system prompts of 600-1,500 tokens, chats of 2-6 turns, some random prompts."""
    rng, result = random.Random(seed), []
    systems = [rng.randint(38, 94) for _ in range(5)]
    for chat in range(count):
        name = 10_000 * (seed + 1) + 100 * chat
        if rng.random() < 0.15:
            result.append([prompt_of((name, rng.randint(38, 125)), output=32)])
            continue
        tenant = rng.randrange(5)
        parts, turns = [(10_000 * (seed + 1) + 9_900 + tenant, systems[tenant])], []
        for turn in range(rng.randint(2, 6)):
            parts = [*parts, (name + turn, rng.randint(3, 13))]
            turns.append(prompt_of(*parts, output=32))
        result.append(turns)
    return result


@pytest.mark.parametrize("clients", [4, 8])
def test_a_small_cpu_fleet_reaches_the_ideal_hit_rate_and_the_lowest_ttft(clients):
    ttft, share = {}, {}
    for policy in ("round_robin", "least_load", "cache_aware"):
        runs = [
            closed_loop(policy, chats(seed), clients, count=2, rate=400.0, step_s=0.02, sync_s=0.1)
            for seed in range(3)
        ]
        ttft[policy] = statistics.fmean(run.ttft for run in runs)
        share[policy] = [run.hit_rate / ideal_hit_rate(run.results) for run in runs]
    assert min(share["cache_aware"]) >= 0.95
    assert ttft["cache_aware"] < 0.97 * ttft["least_load"] < 0.97 * ttft["round_robin"]


def test_one_hot_prefix_is_not_worse_than_round_robin_once_it_is_copied():
    for rate_per_s, copies in ((5, range(2, 6)), (40, [8])):
        runs = {}
        for policy in ("round_robin", "cache_aware"):
            prompts = [prompt_of((1, 250), (100 + i, 6), output=64) for i in range(1000)]
            runs[policy] = open_loop(policy, prompts, rate_per_s, step_s=0.001)
        late = {
            policy: statistics.fmean(p.ttft for p in run.results if p.arrival > 0.3 * run.now)
            for policy, run in runs.items()
        }
        assert late["cache_aware"] <= 1.02 * late["round_robin"]
        assert runs["cache_aware"].hit_rate >= runs["round_robin"].hit_rate
        assert len(runs["cache_aware"].shares) in copies


def test_without_reuse_it_is_no_worse_than_least_load_and_spreads():
    runs = {}
    for policy in ("least_load", "cache_aware"):
        prompts = [prompt_of((i, random.Random(i).randint(20, 300)), output=40) for i in range(800)]
        runs[policy] = open_loop(policy, prompts, 15)
    assert runs["cache_aware"].ttft <= 1.02 * runs["least_load"].ttft
    assert min(runs["cache_aware"].shares.values()) > 70


def test_paced_misses_spread_and_fill_all_caches():
    fleet = Fleet("cache_aware", count=4, blocks=1000)
    for i in range(200):
        fleet.submit(1.0 * i, prompt_of((i, 40), output=4))
    fleet.run()
    assert all(35 <= share <= 65 for share in fleet.shares.values())
    assert all(len(replica.cache) == 1000 for replica in fleet.replicas.values())


def test_separate_caches_hit_like_one_when_misses_go_to_the_oldest_victim():
    """Documents asked for again and again, just as many as fit into all caches together."""
    asked = random.Random(3).choices(range(90), k=1500)
    runs = {}
    for policy in ("round_robin", "cache_aware"):
        fleet = Fleet(policy, count=4, blocks=1000)
        for i, document in enumerate(asked):
            fleet.submit(0.1 * i, prompt_of((document, 40), (1000 + i, 1), output=4))
        runs[policy] = fleet.run()
    assert runs["cache_aware"].hit_rate > 0.85
    assert runs["round_robin"].hit_rate < 0.5


@pytest.mark.parametrize("full", [True, False])
def test_a_burst_for_a_new_prefix_computes_it_a_few_times(full):
    fleet = Fleet("cache_aware", count=16, blocks=800)
    for i in range(64 * full):  # until nothing is free anywhere
        fleet.submit(0.0, prompt_of((1000 + i, 250), output=1))
    for i in range(200):
        fleet.submit(1000.0, prompt_of((1, 250), (100 + i, 3), output=20))
    fleet.run()
    burst = [prompt for prompt in fleet.results if prompt.arrival == 1000.0]
    homes = {prompt.replica for prompt in burst if prompt.cached < 4000}
    assert sum(prompt.cached < 4000 for prompt in burst) == len(homes), "once each"
    assert len(homes) <= (8 if full else 16), "where it evicts something, on few"


def test_slow_replicas_get_less():
    prompts = [prompt_of((i, 100), output=10) for i in range(400)]
    fleet = open_loop("cache_aware", prompts, 8, count=4, rates=[8000.0, 8000.0, 2000.0, 2000.0])
    shares = fleet.shares
    assert shares["r0"] + shares["r1"] > 1.5 * (shares["r2"] + shares["r3"])


def test_nobody_waits_while_others_have_long_been_idle():
    """A favourite with much to do, a fleet with nothing to do: none waits longer than computing."""
    fleet = Fleet("cache_aware", count=8)
    fleet.submit(0.0, prompt_of((1, 200), output=4))
    for i in range(6):
        fleet.submit(5.0, prompt_of((1, 200), (50 + i, 100), output=4))
    fleet.run()
    recompute_s = 300 * BLOCK / 8000.0
    assert max(prompt.ttft for prompt in fleet.results) < 1.5 * recompute_s
