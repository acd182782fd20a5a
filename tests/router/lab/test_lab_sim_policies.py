"""Peers' policies in the simulation: decisions that follow from each one's rule, by hand."""

import random

import numpy as np
import pytest

from kvcore.events import BlocksRemoved, BlocksStored, Cleared
from kvcore.hashing import PrefixHasher
from router.lab.record import Request
from router.lab.sim.fleet import Fleet, FleetConfig
from router.lab.sim.policies import News, make_policy, preble
from router.lab.sim.policies.prefix_tree import PrefixTree, as_text, shared
from router.lab.sim.policies.ray_prefix import OwnTree
from router.lab.sim.replica import SPACE
from router.lab.sim.request import SimRequest

BLOCK = 4
HASHER = PrefixHasher(b"test")


class Desk:
    """A policy with idle replicas, at whose clock we sit."""

    def __init__(self, name, replicas, tree=None):
        self.now = 0.0
        self.policy = make_policy(name, BLOCK, 1, lambda: self.now, random.Random(0))
        if tree is not None:
            self.policy.tree = tree
        for number in range(replicas):
            self.policy.joined(number)
            self.hear(number)

    def hear(self, replica, *events, waiting=0, held=0):
        load = {"waiting": waiting, "held": held, "num_blocks": 10, "prefill_tokens_per_s": 100.0}
        self.policy.heard(replica, News(None, list(events), load))

    def hold(self, replica, tokens):
        self.hear(replica, BlocksStored(1, hashes(tokens), None, b""))

    def place(self, tokens, answer=1):
        request = SimRequest(np.array(tokens, np.int32), hashes(tokens), answer, self.now)
        request.replica = self.policy.place(request)
        return request

    def chosen(self, tokens, answer=1):
        return self.place(tokens, answer).replica

    def start(self, request):
        request.first_at = self.now
        self.policy.started(request, 0, 0)

    def finish(self, request):
        self.policy.finished(request)


def hashes(tokens):
    return HASHER.block_hashes(np.array(tokens, np.int32), BLOCK, HASHER.root(SPACE))


def prompt(first, length):
    """`length` tokens that no prompt with another `first` shares."""
    return list(range(first * 10_000, first * 10_000 + length))


A, B = prompt(1, 160), prompt(2, 160)


def test_sglang_follows_a_match_of_more_than_the_threshold():
    desk = Desk("sglang", 3)
    assert [desk.chosen(A), desk.chosen(B)] == [0, 1], "the least loaded, the first of several"
    assert desk.chosen(A + prompt(3, 160)) == 0, "half of it matches"
    assert desk.chosen(A + prompt(4, 400)) == 2, "10 of 35 chunks: less than 0.3"


def test_sglang_balances_when_queues_differ_by_more_than_64():
    desk = Desk("sglang", 2)
    assert [desk.chosen(A) for _ in range(66)] == [0] * 65 + [1]
    desk = Desk("sglang", 2)
    for number in range(200):
        desk.policy.inflight[number % 2] += 1
    assert [desk.chosen(A) for _ in range(65)] == [0] * 65, "165 is not more than 1.5 times 100"


def test_sglang_evicts_from_trees_that_are_too_large():
    desk = Desk("sglang", 2)
    desk.policy.max_tree_size = 30
    for tokens in (A, B, A, prompt(3, 160)):
        desk.finish(desk.place(tokens))  # all of them by the first replica: 60 characters
    desk.place(prompt(4, 16))
    desk.now = 120.0
    assert [desk.chosen(A), desk.chosen(B)] == [1, 0], "of A, B, 3 and 4 only 4 and 3 are left; loads decide"


@pytest.mark.parametrize("tree", [None, OwnTree()], ids=["ray", "own"])
def test_ray_follows_a_tenth_and_prefers_the_shorter_queue(tree):
    desk = Desk("ray_prefix", 3, tree)
    assert [desk.chosen(A), desk.chosen(B)] == [0, 1], "nothing matches: those with the least text"
    assert desk.chosen(A + prompt(3, 1440)) == 0, "10 of 100 chunks"
    assert desk.chosen(A + prompt(4, 1456)) == 2, "10 of 101: the one without any text"
    assert desk.chosen(A) == 2, "0 and 2 have it; 2 has the shorter queue"


def chats(count):
    """Chats that grow by 1 to 9 chunks, over three system prompts."""
    rng, grown = np.random.default_rng(0), {}
    for number in range(count):
        name = int(rng.integers(12))
        grown[name] = grown.get(name, prompt(name % 3, 64)) + prompt(
            number + 10, 16 * int(rng.integers(1, 10))
        )
        yield Request(token_ids=np.array(grown[name], np.int32), max_tokens=9, timestamp_s=number / 20)


def test_rays_tree_and_ours_choose_the_same():
    rays, ours = (Fleet(FleetConfig(replicas=4, block_size=16), "ray_prefix") for _ in range(2))
    ours.policy.tree = OwnTree()
    assert type(rays.policy.tree) is not OwnTree
    first, second = rays.run(chats(200)), ours.run(chats(200))
    assert (first.per_replica, first.ttft_s) == (second.per_replica, second.ttft_s)


def test_dynamo_weighs_prefill_against_active_blocks():
    desk = Desk("dynamo", 2)
    first = prompt(1, 24)
    desk.hold(0, first[:16])
    one = desk.place(first)
    assert one.replica == 0, "6 blocks - 4 that overlap + 6 active: 8 against 12"
    assert desk.chosen(prompt(2, 24)) == 1, "2 blocks pending + 6 + 12 active: 20 against 12"
    desk = Desk("dynamo", 2)
    desk.hold(0, first[:16])
    desk.start(desk.place(first))
    assert desk.chosen(first[:8] + prompt(3, 16)) == 1, "6 - 2 + 10 active: 14 against 12"
    desk = Desk("dynamo", 2)
    desk.hold(0, first[:16])
    desk.start(desk.place(first))
    assert desk.chosen(first[:16] + prompt(3, 8)) == 0, "6 - 4 + 8 active: 10 against 12"


def test_dynamo_has_the_costs_that_dynamo_logs():
    """Ten prompts at once that share a block of 512, and the logits that Dynamo 1.6.1 logged for them."""
    lengths = (6758, 7322, 7236, 2290, 6760, 4834, 23141, 26888, 10498, 17450)
    logged = (26.19921875, 28.30078125, 28.1328125, 8.47265625, 26.203125)
    logged += (18.44140625, 90.197265625, 104.515625, 47.9765625, 85.5234375)
    policy = make_policy("dynamo", 512, 1, lambda: 0.0, random.Random(0))
    for replica in range(8):
        policy.joined(replica)
    for number, (length, logit) in enumerate(zip(lengths, logged, strict=True)):
        tokens = np.full(length, number + 1, np.int32)
        tokens[:512] = 0
        request = SimRequest(tokens, HASHER.block_hashes(tokens, 512, HASHER.root(SPACE)), 1, 0.0)
        costs = policy.costs(request)
        assert min(costs.values()) == logit
        request.replica = policy.place(request)
        assert costs[request.replica] == logit


def test_lmetric_multiplies_prefill_by_requests():
    desk = Desk("lmetric", 2)
    first = prompt(1, 24)
    desk.hold(0, first[:16])
    one = desk.place(first)
    assert one.replica == 0, "8 tokens against 24"
    other = desk.place(first)
    assert other.replica == 1, "(8 + 8) * 2 against 24"
    desk.start(one)
    assert desk.chosen(first) == 0, "(0 + 8) * 2 against (24 + 24) * 2"


def test_llmd_adds_prefix_queue_and_utilization():
    desk = Desk("llmd", 3)
    first = prompt(1, 24)
    desk.hold(0, first[:8])
    desk.hold(1, first[:4])
    assert desk.chosen(first) == 0, "3 + 2 + 2; the shorter match scores as much as none"
    desk.hear(0, waiting=4, held=8)
    desk.hear(2, held=1)
    assert desk.chosen(first) == 1, "3 + 0.4 + 0 against 0 + 2 + 2 and 0 + 1.8 + 2"


def test_events_are_followed_block_by_block():
    desk = Desk("lmetric", 2)
    tokens = prompt(1, 16)
    desk.hold(1, tokens)
    desk.hear(1, BlocksRemoved(2, hashes(tokens)[3:]))
    assert [desk.policy.cached_blocks(number, hashes(tokens).tolist()) for number in (0, 1)] == [0, 3]
    desk.hear(1, Cleared(3))
    assert desk.policy.cached_blocks(1, hashes(tokens).tolist()) == 0


def test_preble_exploits_what_outweighs_the_rest():
    desk = Desk("preble", 2)
    assert desk.chosen(A, 100) == 0
    assert desk.chosen(A[:96] + prompt(3, 64)) == 0, (
        "96 tokens cached, 64 not: where they are, whatever the load"
    )
    assert desk.chosen(A[:64] + prompt(4, 96)) == 1, "64 cached, 96 not: the least load"


def test_preble_forgets_after_three_minutes():
    desk = Desk("preble", 2)
    one = desk.place(A)
    assert one.replica == 0
    desk.finish(one)
    desk.now = 181.0
    assert [desk.chosen(B), desk.chosen(prompt(3, 1600))] == [1, 0]
    assert desk.chosen(A + prompt(4, 16)) == 1, "the first replica has more to do, and A is forgotten"


def test_preble_shares_a_prefix_that_slows_down(monkeypatch):
    monkeypatch.setattr(preble, "REQUESTS_BEFORE_REBALANCING", 2)
    desk = Desk("preble", 2)
    early, late = desk.place(A + prompt(3, 16), 50), desk.place(A + prompt(4, 16), 50)
    assert (early.replica, late.replica) == (0, 0)
    desk.now = 1.0
    desk.start(early)
    desk.now = late.arrived_at = 100.0
    late.arrived_at -= 2.0
    desk.start(late)
    desk.now = 120.0
    assert desk.chosen(B[:32]) == 1
    assert desk.chosen(A + prompt(5, 16), 50) == 0
    assert desk.chosen(A + prompt(6, 16), 50) == 1, "since TTFT has doubled, from 1 s to 2 s"


def test_preble_hands_the_lightest_prefixes_over(monkeypatch):
    monkeypatch.setattr(preble, "REQUESTS_BEFORE_REBALANCING", 3)
    desk = Desk("preble", 2)
    assert [desk.chosen(A + prompt(number, 16)) for number in (3, 4)] == [0, 0]
    one = desk.place(prompt(5, 16), 1000)
    assert one.replica == 1
    assert [desk.chosen(B + prompt(number, 16), 10) for number in (6, 7)] == [0, 0], "the other is busy"
    desk.finish(one)
    assert desk.chosen(prompt(8, 16)) == 1
    # Missed 192 of 352 tokens, two requests: 1.75 s of prefill; answers 2 * 1 and 2 * 10 tokens of 0.15 s.
    # 2.05 + 4.75 s against 0.47 s: A moves; then 4.75 s against 2.52 s: moving B would turn it around.
    assert desk.chosen(A + prompt(9, 16)) == 1
    assert desk.chosen(B + prompt(9, 16)) == 0


def test_trees_of_prompts():
    tree = PrefixTree()
    tree.add(0)
    tree.add(1)
    tree.insert("abcdef", 0)
    tree.insert("abcxyz", 1)
    assert (tree.match("abcxq"), tree.match("abc"), tree.match("q")) == ((4, [1]), (3, [0, 1]), (0, [0, 1]))
    assert tree.sizes == {0: 6, 1: 6}
    tree.insert("abcdefgh", 1)
    assert tree.match("abcdef") == (6, [0, 1])
    tree.evict(8)
    assert tree.sizes == {0: 6, 1: 8}, "xyz was used before the rest"
    tree.remove(0)
    assert (tree.sizes, tree.match("abcdefgh")) == ({1: 8}, (8, [1]))
    tree.evict(0)
    assert (tree.sizes, tree.match("abc"), tree.root.children) == ({1: 0}, (0, [1]), {})


def test_texts_share_what_prompts_share():
    one, other = as_text(np.array(A, np.int32)), as_text(np.array([*A[:40], 7], np.int32))
    assert (len(one), len(other), shared(one, other)) == (20, 6, 4)
    assert shared("abc", "abcd") == 3 and shared("", "a") == 0 and shared("ba", "ab") == 0
