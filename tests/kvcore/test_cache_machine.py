r"""The cache against a naive twin, step by step, in tiny pools with every kind of trouble.

All operations under all policies, with forced collisions and a clock that the test turns. Hypothesis finds
short counterexamples; the random lives are long, and prove that each kind of trouble did occur. More of both:

    KVCORE_EXAMPLES=2000 KVCORE_STEPS=200 KVCORE_RANDOM_LIVES=3000 \
        pytest --timeout 0 tests/kvcore/test_cache_machine.py
"""

import os
import random
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcore.namespace import Namespace

SPACES = [Namespace("m"), Namespace("m", salt=""), Namespace("m", adapter="a", tenant="t")]
TEXTS = [[0] * 24, [0, 1, 2, 0, 1] * 5, [0, 0, 1, 1, 2, 2, 0, 0] * 3]
POLICIES = ["reuse", "lru", "lfu", "fifo", "priority"]
# Time stands still, or goes on by amounts whose sums never differ by the 300 s of a bonus or a half-life.
PAUSES = [0.0, 0.0, 0.7, 97.3, 311.9]
RANGES = [
    (),
    (),
    (),
    ((0, None, 80, None),),
    ((0, None, 20, 90.0),),
    ((0, 4, 50, 100.0), (4, 9, 10, None)),
    ((3, None, 35, 1.0),),
]
PROMPT = {
    "text": st.sampled_from(TEXTS),
    "length": st.integers(1, 20),
    "own": st.lists(st.integers(0, 2), max_size=2),
    "space": st.sampled_from(SPACES),
    "read": st.sampled_from([True, True, False]),
    "publish": st.sampled_from([True, True, False]),
    "bring_hashes": st.booleans(),
    "follow": st.integers(0, 9),
    "ranges": st.sampled_from(RANGES),
}


def prompt(text, length, own, **options):
    return {"tokens": text[:length] + own, **options}


class CacheMachine(RuleBasedStateMachine):
    def __init__(self, make_harness):
        super().__init__()
        self.make_harness = make_harness
        self.harness = None

    @initialize(
        num_blocks=st.integers(1, 16),
        size=st.integers(1, 4),
        bits=st.sampled_from([64, 64, 1, 2, 3, 4]),
        capacity=st.sampled_from([1000, 12, 3]),
        policy=st.sampled_from(POLICIES),
    )
    def start(self, **options):
        self.harness = self.make_harness(**options)

    @rule(**PROMPT, pause=st.sampled_from(PAUSES), then=st.sampled_from(["end", "commit", "hold"]))
    def claim(self, pause, then, **options):
        self.harness.now += pause
        live = len(self.harness.live)
        self.harness.claim(**prompt(**options))
        if len(self.harness.live) > live and then != "hold":
            self.harness.agree()
            self.harness.commit(-1, 0)
            if then == "end":
                self.harness.agree()
                self.harness.release(-1, 1)
        self.harness.agree()

    @rule(batch=st.lists(st.fixed_dictionaries(PROMPT), min_size=2, max_size=4))
    def claim_many(self, batch):
        self.harness.claim_many([prompt(**options) for options in batch])
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

    @precondition(lambda self: self.harness.live)
    @rule(which=st.integers(0, 9), first=st.lists(st.integers(0, 2), max_size=3), left=st.integers(0, 5))
    def fork(self, which, first, left):
        """The fork may go on at once, and the first may take back tokens."""
        self.harness.fork(which)
        self.harness.agree()
        self.harness.append(-1, first)
        self.harness.agree()
        if left:
            self.harness.truncate(which, left)
            self.harness.agree()

    @precondition(lambda self: self.harness.live)
    @rule(which=st.integers(0, 9), left=st.integers(0, 9))
    def truncate(self, which, left):
        self.harness.truncate(which, left)
        self.harness.agree()

    @precondition(lambda self: self.harness.live)
    @rule(which=st.integers(0, 9), back=st.integers(1, 6), tokens=st.lists(st.integers(0, 2), max_size=4))
    def settle(self, which, back, tokens):
        self.harness.settle(which, back, tokens)
        self.harness.agree()

    @rule(space=st.sampled_from([*SPACES, None]))
    def clear(self, space):
        self.harness.clear(space)
        self.harness.agree()

    @rule(text=st.sampled_from(TEXTS), length=st.integers(1, 24), space=st.sampled_from(SPACES))
    def explain(self, text, length, space):
        self.harness.explain(text[:length], space)
        self.harness.agree()

    @rule(which=st.integers(0, 2))
    def poll(self, which):
        self.harness.poll(which)

    def teardown(self):
        if self.harness is not None:
            self.harness.finish()


def test_hypothesis_finds_no_difference(make_harness):
    run_state_machine_as_test(
        lambda: CacheMachine(make_harness),
        settings=settings(
            max_examples=int(os.environ.get("KVCORE_EXAMPLES", "200")),
            stateful_step_count=int(os.environ.get("KVCORE_STEPS", "30")),
            suppress_health_check=list(HealthCheck),
            deadline=None,
        ),
    )


# Each action and how often it comes; a clear is rare, or nothing would ever be old.
SHARES = {"claim": 8, "batch": 0.5, "append": 4, "commit": 7, "release": 7, "fork": 2, "truncate": 1.5}
SHARES |= {"explain": 2, "poll": 2, "clear": 0.3, "settle": 1}


def random_prompt(rng):
    own = [rng.randint(0, 2) for _ in range(rng.randint(0, 4))]
    return {
        "tokens": rng.choice(TEXTS)[: rng.randint(1, 20)] + own,
        "space": rng.choice(SPACES),
        "read": rng.random() < 0.9,
        "publish": rng.random() < 0.9,
        "bring_hashes": rng.random() < 0.5,
        "follow": rng.randrange(12),
        "ranges": rng.choice(RANGES),
    }


def act(harness, rng, action):
    """One action, if it is possible now."""
    which = rng.randrange(100)
    if action == "claim":
        harness.now += rng.choice(PAUSES) * rng.random()
        harness.claim(**random_prompt(rng))
    elif action == "batch":
        harness.claim_many([random_prompt(rng) for _ in range(rng.randint(2, 4))])
    elif action == "explain":
        harness.explain(rng.choice(TEXTS)[: rng.randint(1, 24)], rng.choice(SPACES))
    elif action == "poll":
        harness.poll(which % 3)
    elif action == "clear":
        harness.clear(rng.choice([None, *SPACES]))
    elif harness.live and action == "append":
        harness.append(which, [rng.randint(0, 2) for _ in range(rng.randint(0, 5))])
    elif harness.live and action == "commit":
        harness.commit(which, rng.choice([0, 0, 0, 1, 3, 7]))
    elif harness.live and action == "fork":
        harness.fork(which)
        harness.append(-1, [rng.randint(0, 2)])
    elif harness.live and action == "truncate":
        harness.truncate(which, rng.choice([1, 2, 3, 8]))
    elif harness.live and action == "settle":
        harness.settle(which, rng.randint(1, 6), [rng.randint(0, 2) for _ in range(rng.randint(0, 4))])
    elif harness.live and action == "release":
        harness.release(which, rng.randint(1, 2))


def random_life(make_harness, seed, steps):
    rng = random.Random(seed)
    bits, capacity = rng.choice([1, 2, 3, 4, 64, 64, 64, 64]), rng.choice([3, 20, 1000])
    num_blocks, size = rng.choice([1, 2, 6, 12, 24, 32]), rng.randint(1, 4)
    harness = make_harness(num_blocks, size, bits, capacity, POLICIES[seed % len(POLICIES)])
    for _ in range(steps):
        act(harness, rng, rng.choices(list(SHARES), list(SHARES.values()))[0])
        harness.agree()
    harness.finish()
    return harness.seen


def test_long_random_lives(make_harness):
    seen = Counter()
    for seed in range(int(os.environ.get("KVCORE_RANDOM_LIVES", "60"))):
        seen += random_life(make_harness, seed, 150)
    kinds = ["hits", "partial hit", "evictions", "collisions", "twins", "out of blocks", "gap", "delta"]
    kinds += ["regrets", "refused in a batch", "forks", "copy on write", "truncated what is published"]
    kinds += ["cleared while held", "settled"]
    assert min(seen[kind] for kind in kinds) > 15, seen
    reasons = {"complete", "short", "uncommitted", "evicted", "namespace", "differs", "unseen"}
    assert {kind for kind in seen if kind.startswith("why: ")} == {"why: " + reason for reason in reasons}
