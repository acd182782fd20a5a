"""Decodes of a simulated replica: what each has is right whenever somebody asks, whoever leaves meanwhile."""

import numpy as np
import pytest

from kvcore.cache import PrefixCache
from router.lab.sim.decodes import Decodes
from router.lab.sim.request import HASHER, SPACE, SimRequest

BLOCK = 4


class Desk:
    """Sequences on a cache, each with its first token."""

    def __init__(self):
        self.cache = PrefixCache(64, BLOCK, HASHER)
        self.decodes = Decodes(BLOCK)

    def join(self, prompt, answer):
        tokens = np.arange(prompt, dtype=np.int32)
        request = SimRequest(tokens, HASHER.block_hashes(tokens, BLOCK, HASHER.root(SPACE)), answer, 0.0)
        request.lease = self.cache.claim(tokens, SPACE)
        request.computed, request.produced = prompt, 1
        self.decodes.add(request)
        self.grow(request)
        return request

    def grow(self, request):
        if request.num_tokens > len(request.lease.blocks) * BLOCK:
            self.cache.append(request.lease, np.zeros(request.num_tokens - len(request.lease), np.int32))
        self.decodes.plan(request)

    def step(self, steps=1):
        self.decodes.step(steps)
        return list(self.decodes.due())


def test_a_sequence_comes_up_when_it_needs_a_block_and_when_it_ends():
    desk = Desk()
    request = desk.join(6, 7)  # 7 of 8 places are taken
    assert desk.decodes.until_end() == 6
    assert [desk.step(), desk.step()] == [[], [request]]
    assert (request.computed, request.produced, desk.decodes.context) == (8, 3, 8)
    desk.grow(request)
    assert [desk.step(2), desk.decodes.until_end()] == [[], 2]
    assert desk.step(2) == [request] and request.produced == 7


def test_those_due_come_up_in_the_order_in_which_they_joined():
    desk = Desk()
    late, early, other = desk.join(4, 9), desk.join(6, 9), desk.join(20, 9)
    # In a run of 6 steps the second one needs its block first.
    assert desk.step(6) == [late, early, other]
    assert [request.produced for request in (late, early, other)] == [7, 7, 7]
    assert desk.decodes.context == 4 + 6 + 20 + 3 * 6 and len(desk.decodes) == 3


def test_who_makes_room_before_its_turn_has_not_got_the_token():
    desk = Desk()
    first, second = desk.join(7, 20), desk.join(5, 20)
    desk.decodes.step(1)
    newest = desk.join(9, 20)
    for request in desk.decodes.due():
        assert request is first and request.produced == 2
        assert [desk.decodes.pop(), desk.decodes.pop()] == [newest, second]
    assert (second.computed, second.produced) == (5, 1), "not counted yet"
    assert (newest.computed, newest.produced) == (9, 1), "it joined after the step"
    assert list(desk.decodes) == [first] and desk.decodes.context == 8
    desk.grow(first)
    assert desk.decodes.until_end() == 18, "ends of those that left do not count"


def test_all_leave_with_what_they_got():
    desk = Desk()
    one, other = desk.join(4, 50), desk.join(8, 50)
    desk.step(3)
    assert desk.decodes.leave() == [one, other]
    assert (one.produced, other.produced, other.computed) == (4, 4, 11)
    assert (len(desk.decodes), desk.decodes.context) == (0, 0)
    again = desk.join(4, 5)
    assert desk.step() == [] and desk.step(3) == [again]


@pytest.mark.parametrize("seed", range(4))
def test_as_counting_every_step(seed):
    rng, desk, plain = np.random.default_rng(seed), Desk(), {}
    for _ in range(300):
        if len(plain) < 3:
            request = desk.join(int(rng.integers(1, 20)), int(rng.integers(2, 30)))
            plain[request] = [request.computed, request.produced]
        steps = min(int(rng.integers(1, 5)), desk.decodes.until_end())
        for counts in plain.values():
            counts[0] += steps
            counts[1] += steps
        assert (
            steps < desk.decodes.until_end() or min(r.answer_tokens - p for r, (_, p) in plain.items()) == 0
        )
        for request in desk.step(steps):
            assert [request.computed, request.produced] == plain[request]
            if request.produced == request.answer_tokens:
                desk.decodes.remove(request)
                desk.cache.release(request.lease)
                del plain[request]
            else:
                desk.grow(request)
        assert desk.decodes.context == sum(computed for computed, _ in plain.values())
        assert list(desk.decodes) == list(plain)
