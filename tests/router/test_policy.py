"""The registry of policies, and that a policy of one's own can be added."""

import random

import pytest

from router import policy as policies
from router.errors import UnknownPolicy
from router.placement import Placement
from router.policy import Choice, make_policy, policy_names, register


def test_names():
    assert policy_names() == ["cache_aware", "least_load", "round_robin"]
    assert [make_policy(name, random.Random()).name for name in policy_names()] == policy_names()
    with pytest.raises(UnknownPolicy, match="unknown policy 'x'; known policies: cache_aware, least_load"):
        make_policy("x", random.Random())


def test_a_policy_of_ones_own(monkeypatch):
    monkeypatch.setattr(policies, "_POLICIES", dict(policies._POLICIES))

    @register
    class Last:
        name = "last"

        def __init__(self, rng):
            pass

        def choose(self, situation):
            return Choice(int(situation.allowed.nonzero()[0][-1]), "last")

    placement = Placement("last")
    for name in "abc":
        placement.join(name)
    decision = placement.place([], 10)
    assert (decision.replica_id, decision.reason, placement.policy) == ("c", "last", "last")
    assert [c.cost_s for c in decision.candidates()] == [None, None, None]


def test_the_same_seed_gives_the_same_choices():
    def run(seed):
        placement = Placement(rng=random.Random(seed), clock=lambda: 0.0)
        for i in range(8):
            placement.join(str(i))
        return [placement.place([], 100).replica_id for _ in range(50)]

    assert run(1) == run(1) != run(2)
