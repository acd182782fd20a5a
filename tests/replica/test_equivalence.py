"""However a prompt is served, cached, partly cached, chunked, batched, preempted, its answer is the same."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.build import build_engine
from replica.config import EngineConfig
from replica.errors import OfflineError
from replica.models import load_tokenizer


def prompts(count, vocab, seed=0):
    """Prompts of 1 to 160 tokens that share beginnings in groups of five."""
    random = np.random.default_rng(seed)
    found, stem = [], []
    for i in range(count):
        if i % 5 == 0:
            stem = random.integers(3, vocab, random.integers(1, 120)).tolist()
        own = random.integers(3, vocab, random.integers(1, 40)).tolist()
        found.append(stem[: random.integers(1, len(stem) + 1)] + own)
    return found


PROMPTS = prompts(50, 259)
LENGTH = 12


@pytest.fixture(scope="module")
def expected(tiny_engine, ask, run_all):
    """Each prompt alone, in one piece, without a cache."""
    engine = tiny_engine()
    found = []
    for prompt in PROMPTS:
        request = ask("r", prompt, read=False, publish=False, max_tokens=LENGTH)
        found.append(run_all(engine, [request])["r"].tokens[0])
    assert engine.cache.stats().hit_tokens == 0
    assert max(Counter(map(tuple, found)).values()) < 5  # the model does tell prompts apart
    return found


def answers(engine, run_all, requests):
    results = run_all(engine, requests)
    engine.cache.check()
    stats = engine.cache.stats()
    assert stats.free + stats.cached == stats.num_blocks
    return [results[request.id].tokens[0] for request in requests]


@pytest.fixture
def requests(ask):
    return [ask(str(i), prompt, max_tokens=LENGTH) for i, prompt in enumerate(PROMPTS)]


def test_one_after_the_other_with_a_cache_then_all_of_it_cached(tiny_engine, run_all, requests, expected):
    engine = tiny_engine(num_blocks=2048)
    assert [answers(engine, run_all, [request])[0] for request in requests] == expected
    partly = engine.cache.stats().hit_tokens
    assert partly > 1000
    assert [answers(engine, run_all, [request])[0] for request in requests] == expected
    assert engine.cache.stats().hit_tokens - partly >= sum(len(p) // 4 * 4 - 1 for p in PROMPTS) - 50 * 4


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_chunked(tiny_engine, run_all, requests, expected, chunk):
    engine = tiny_engine(max_batch_tokens=chunk, max_num_seqs=1)
    assert [answers(engine, run_all, [request])[0] for request in requests[::5]] == expected[::5]


def test_batched_all_at_once(tiny_engine, run_all, requests, expected):
    engine = tiny_engine(num_blocks=4096)
    assert answers(engine, run_all, requests) == expected


def test_batched_and_chunked_with_evictions(tiny_engine, run_all, requests, expected):
    engine = tiny_engine(num_blocks=96, max_batch_tokens=48, max_num_seqs=7)
    assert answers(engine, run_all, requests) == expected
    assert engine.cache.stats().evictions > 100


def test_preempted(tiny_engine, ask, run_all):
    loose, tight = tiny_engine(), tiny_engine(num_blocks=20, max_batch_tokens=24, max_num_seqs=10)
    requests = [ask(str(i), prompt[:30], max_tokens=24) for i, prompt in enumerate(PROMPTS)]
    assert answers(tight, run_all, requests) == [answers(loose, run_all, [r])[0] for r in requests]
    assert tight.scheduler.preemptions > 20


def test_seeded_draws_do_not_depend_on_neighbours_or_preemption(tiny_engine, ask, run_all):
    def asked(i):
        return ask(str(i), PROMPTS[i][:30], temperature=2.0, top_p=0.95, seed=i, max_tokens=30)

    alone = [answers(tiny_engine(), run_all, [asked(i)])[0] for i in range(12)]
    tight = tiny_engine(num_blocks=18, max_batch_tokens=24, max_num_seqs=10)
    assert answers(tight, run_all, [asked(i) for i in range(12)]) == alone
    assert tight.scheduler.preemptions > 0


@pytest.fixture(scope="module")
def tight(tiny_engine):
    """One pool of 12 blocks for all examples: what earlier ones left in the cache must not matter."""
    return tiny_engine(num_blocks=12, max_batch_tokens=12, max_num_seqs=5)


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 9), st.integers(1, 3), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 4)),
)


@pytest.fixture(scope="module")
def short_answers(tiny_engine, ask, run_all):
    """The first prompts, cut to what fits the tiny pool, each alone."""
    cut = [ask(str(i), prompt[:30], max_tokens=LENGTH) for i, prompt in enumerate(PROMPTS[:10])]
    return [answers(tiny_engine(), run_all, [request])[0] for request in cut]


class Mix:
    """Adds, aborts and steps in any order, with a memory of what must come out."""

    def __init__(self, engine, ask):
        self.engine, self.ask = engine, ask
        self.live, self.asked, self.tokens, self.finished = [], {}, {}, set()

    def add(self, which, n, length):
        name = f"r{len(self.asked)}"
        self.engine.add(self.ask(name, PROMPTS[which][:30], n=n, max_tokens=length))
        self.live.append(name)
        self.asked[name] = (which, n, length)

    def abort(self, which):
        if self.live:
            self.engine.abort(self.live.pop(which % len(self.live)))

    def step(self, count=1):
        for _ in range(count):
            for output in self.engine.step():
                self.tokens.setdefault((output.request_id, output.index), []).extend(output.tokens)
                if output.last:
                    self.live.remove(output.request_id)
                    self.finished.add(output.request_id)


@settings(max_examples=60, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=25))
def test_any_mix_of_adds_aborts_and_steps_in_a_tiny_pool(tight, ask, short_answers, actions):
    mix = Mix(tight, ask)
    for action, *details in actions:
        getattr(mix, action)(*details)
        tight.cache.check()
    steps = 0
    while tight.has_work() and (steps := steps + 1) < 5000:
        mix.step()
    tight.cache.check()
    stats = tight.cache.stats()
    assert (mix.live, tight.has_work()) == ([], False)
    assert (stats.held, stats.leases, stats.free + stats.cached) == (0, 0, 12)
    for name in mix.finished:
        which, n, length = mix.asked[name]
        for index in range(n):
            assert mix.tokens[name, index] == short_answers[which][:length]


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_gives_the_same_answers_however_it_is_served(ask, run_all):
    try:
        vocab = load_tokenizer("smollm2-135m").vocab_size
        engine = build_engine(
            EngineConfig(num_blocks=256, max_batch_tokens=96, max_num_seqs=6, hash_secret=b"s")
        )
    except OfflineError as error:
        pytest.skip(str(error))
    some = prompts(50, vocab)
    alone = []
    for prompt in some:
        request = ask("r", prompt, read=False, publish=False, max_tokens=4)
        alone.append(run_all(engine, [request])["r"].tokens[0])
    requests = [ask(str(i), prompt, max_tokens=4) for i, prompt in enumerate(some)]
    assert answers(engine, run_all, requests) == alone
    hits = engine.cache.stats().hit_tokens
    assert answers(engine, run_all, requests) == alone
    assert engine.cache.stats().hit_tokens - hits > 2000
