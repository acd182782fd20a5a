"""Guessing ahead: what is guessed, and that answers, log-probabilities and the cache are the same with it."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replica.config import EngineConfig
from replica.drafts import came_true, look_up
from replica.errors import ConfigError

REPEATING = [7, 8, 9, 10, 11] * 6
PARROT = {"frequency_penalty": -1.0}
"""The tiny model seldom repeats itself; a penalty below zero makes it do so."""
PROMPTS = [REPEATING, [*range(40, 52), *range(40, 49)], [3, 3, 3], list(range(100, 130)), [250] * 12]


def guess(tokens, count):
    return look_up(np.array(tokens, dtype=np.int32), count).tolist()


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], 2, [4, 9]),
        ([1, 2, 3, 4, 5, 2, 3, 6, 9, 2, 3], 2, [6, 9]),  # the latest
        ([1, 2, 3, 4, 7, 2, 3, 6, 1, 2, 3], 1, [4]),  # three tokens before two, however far back
        ([3, 8, 4, 3], 2, [8, 4]),
        ([1, 2, 3, 4, 1], 9, [2, 3, 4, 1, 2, 3, 4, 1, 2]),  # it goes on with itself
        ([5, 5, 5], 3, [5, 5, 5]),
        ([1, 2, 3], 4, []),
        ([1, 1], 0, []),
        ([1], 4, []),
        ([], 4, []),
    ],
)
def test_a_guess_is_what_followed_the_longest_match(tokens, count, expected):
    assert guess(tokens, count) == expected


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 6))
def test_guesses_equal_a_plain_search(tokens, count):
    expected = []
    for size in (3, 2, 1):
        starts = [i for i in range(len(tokens) - size) if tokens[i : i + size] == tokens[-size:]]
        if starts:
            follows = tokens[starts[-1] + size :]
            expected = (follows * (count + 1))[:count]
            break
    assert guess(tokens, count) == expected


def test_a_guess_counts_while_it_equals_what_is_drawn():
    assert [came_true(drafts, [4, 5, 6, 7]) for drafts in ([], [4, 5], [4, 6, 6], [5, 5])] == [0, 2, 1, 0]


@pytest.fixture
def outcome(run_all):
    """Tokens, text, reasons and usage of all requests on one engine, and all their log-probabilities."""

    def run(engine, requests):
        results = run_all(engine, requests)
        engine.cache.check()
        stats = engine.cache.stats()
        assert (stats.held, stats.free + stats.cached) == (0, stats.num_blocks)
        found, logprobs = {}, {}
        for name, result in results.items():
            found[name] = (result.tokens, result.text, result.reason, result.usage)
            for output in result.outputs:
                for entry in output.logprobs or ():
                    numbers = [entry["logprob"], *(other["logprob"] for other in entry["top"])]
                    logprobs.setdefault((name, output.index), []).append(numbers)
        return found, {key: np.array(numbers) for key, numbers in logprobs.items()}

    return run


KINDS = {
    "greedy": {},
    "parrot": PARROT,
    "drawn": {"temperature": 0.5, "seed": 3, **PARROT},
    "filtered": {"temperature": 0.9, "seed": 4, "top_p": 0.8, "top_k": 30, "min_p": 0.01, **PARROT},
    "penalised": {"repetition_penalty": 0.5, "presence_penalty": -0.3, "frequency_penalty": -0.2},
    "told": {"logprobs": 3, "temperature": 0.7, "seed": 9, **PARROT},
    "choices": {"n": 3, "temperature": 1.0, "seed": 1, **PARROT},
    "best": {"n": 1, "best_of": 3, "temperature": 1.0, "seed": 1, **PARROT},
    "beams": {"n": 3, "use_beam_search": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_answers_with_and_without(tiny_engine, ask, outcome, kind):
    def requests():
        return [ask(str(i), prompt, max_tokens=40, **KINDS[kind]) for i, prompt in enumerate(PROMPTS)]

    without, with_drafts = tiny_engine(num_blocks=1024), tiny_engine(num_blocks=1024, draft_tokens=4)
    found, logprobs = outcome(with_drafts, requests())
    expected, expected_logprobs = outcome(without, requests())
    assert found == expected
    assert logprobs.keys() == expected_logprobs.keys()
    assert all(np.allclose(logprobs[key], expected_logprobs[key], atol=1e-4) for key in logprobs)
    assert with_drafts.cache.stats().published == without.cache.stats().published
    load = with_drafts.load()
    assert (load["drafted"] == 0) == (kind == "beams")
    assert kind in ("greedy", "beams") or 20 < load["accepted"] <= load["drafted"]
    assert (without.load()["drafted"], without.load()["accepted"]) == (0, 0)


def test_guesses_that_come_true_save_steps(tiny_engine, ask):
    def steps(engine):
        engine.add(ask("r", [3, 3, 3], max_tokens=60, **PARROT))
        count = 0
        while engine.has_work():
            engine.step()
            count += 1
        return count

    engine = tiny_engine(draft_tokens=5)
    answer_steps = steps(engine)
    assert steps(tiny_engine()) == 60
    assert answer_steps == 60 - engine.load()["accepted"] < 40


def test_the_answer_ends_where_it_would_have(tiny_engine, ask, run_all):
    """A stop, token or string, amid guesses that came true ends it there; nothing after it stays."""
    whole = run_all(tiny_engine(), [ask("r", [3, 3, 3], max_tokens=60, **PARROT)])["r"]
    for length in range(20, 36):
        text = whole.text[0][length : length + 2]
        token = whole.tokens[0][length]
        ends = (
            {"stop": (text,)},
            {"stop": (text,), "min_tokens": length},
            {"stop_token_ids": frozenset({token})},
        )
        for settings_ in ends:
            request = ask("r", [3, 3, 3], max_tokens=60, **settings_, **PARROT)
            plain, drafting = tiny_engine(), tiny_engine(draft_tokens=7)
            expected, found = run_all(plain, [request])["r"], run_all(drafting, [request])["r"]
            assert (found.tokens, found.text, found.reason) == (
                expected.tokens, expected.text, expected.reason
            )  # fmt: skip
            assert drafting.cache.stats().published == plain.cache.stats().published


def test_the_same_answers_in_a_tiny_pool_and_nobody_gives_way_to_a_guess(tiny_engine, ask, outcome):
    def requests():
        return [
            ask(str(i), [*prompt[:20], i], n=2, max_tokens=24, temperature=0.8, seed=i, **PARROT)
            for i, prompt in enumerate(PROMPTS * 2)
        ]

    sizes = {"num_blocks": 18, "max_batch_tokens": 24, "max_num_seqs": 6}
    loose, tight = tiny_engine(), tiny_engine(draft_tokens=6, **sizes)
    assert outcome(tight, requests()) == outcome(loose, requests())
    assert tight.scheduler.preemptions > 0
    assert tight.load()["accepted"] > 0


def test_guesses_take_no_budget_that_others_ask_for(tiny_engine, ask):
    engine = tiny_engine(max_batch_tokens=8, max_num_seqs=8, draft_tokens=6)
    engine.add(ask("r", [3, 3, 3], max_tokens=60, **PARROT))
    for _ in range(5):
        engine.step()
    assert engine.load()["drafted"] > 0
    engine.add(ask("other", range(30)))
    plan = engine.scheduler.schedule()
    assert (plan.drafted, [chunk.count for chunk in plan.chunks]) == (0, [1, 7])


def test_guesses_end_with_the_answer_and_the_context(tiny_engine, ask, run_all):
    for settings_, length in (({"max_tokens": 5, **PARROT}, 5), ({"max_tokens": 99, **PARROT}, 64 - 30)):
        engine = tiny_engine(num_blocks=16, draft_tokens=9)
        result = run_all(engine, [ask("r", REPEATING, **settings_)])["r"]
        plain = run_all(tiny_engine(num_blocks=16), [ask("r", REPEATING, **settings_)])["r"]
        assert (result.tokens, len(result.tokens[0])) == (plain.tokens, length)


def test_less_than_nothing_is_refused():
    with pytest.raises(ConfigError, match="draft_tokens"):
        EngineConfig(draft_tokens=-1)


@pytest.fixture(scope="module")
def engines(tiny_engine):
    sizes = {"num_blocks": 16, "max_batch_tokens": 14, "max_num_seqs": 5}
    return tiny_engine(**sizes), tiny_engine(draft_tokens=3, **sizes)


ASKED = st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(1, 20), st.sampled_from([0.0, 0.9]))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # `outcome` keeps nothing between examples
@given(st.lists(ASKED, min_size=1, max_size=5))
def test_any_mix_of_requests_has_the_same_answers(engines, ask, outcome, asked):
    def requests():
        return [
            ask(
                str(i), PROMPTS[which][:20], n=n, max_tokens=length, temperature=temperature, seed=i, **PARROT
            )
            for i, (which, n, length, temperature) in enumerate(asked)
        ]

    plain, drafting = engines
    (found, _), (expected, _) = outcome(drafting, requests()), outcome(plain, requests())
    # Usage tells what was cached, and what earlier examples have left differs.
    assert {name: facts[:3] for name, facts in found.items()} == {
        name: facts[:3] for name, facts in expected.items()
    }
