"""More choices drawn than asked for: which are returned, in what order, and what is counted."""

import pytest

from replica.errors import InvalidRequest
from replica.request import SamplingParams, Usage

PROMPT = list(range(10, 40))
DRAWN = {"temperature": 3.0, "seed": 5, "max_tokens": 7}


@pytest.fixture
def solo(tiny_engine, ask, run_all):
    def run(**params):
        return run_all(tiny_engine(), [ask("r", PROMPT, **{**DRAWN, **params})])["r"]

    return run


def means(result):
    found = {}
    for output in result.outputs:
        found.setdefault(output.index, []).extend(entry["logprob"] for entry in output.logprobs or ())
    return [sum(found[index]) / len(found[index]) for index in sorted(found)]


def test_the_likeliest_of_all_that_are_drawn_likeliest_first(solo):
    every = solo(n=6, logprobs=0)
    ranking = sorted(range(6), key=lambda index: -means(every)[index])
    best = solo(n=2, best_of=6, logprobs=1)
    assert [best.tokens[rank] for rank in (0, 1)] == [every.tokens[index] for index in ranking[:2]]
    assert [best.text[rank] for rank in (0, 1)] == [every.text[index] for index in ranking[:2]]
    assert means(best) == pytest.approx([means(every)[index] for index in ranking[:2]])
    assert best.usage == Usage(30, 6 * 7, 0)
    assert best.reason == {0: "length", 1: "length"}


def test_everything_but_the_start_comes_at_the_end_and_logprobs_only_when_asked_for(solo):
    start, *answers = solo(n=2, best_of=3).outputs
    assert (start.tokens, start.start.prompt_tokens) == ((), 30)
    assert [(output.index, len(output.tokens), output.logprobs) for output in answers] == [
        (0, 7, None), (1, 7, None)
    ]  # fmt: skip
    assert [output.usage is None for output in answers] == [True, False]


def test_the_mean_decides_not_the_sum(solo):
    # Each choice but one has a token that ends it somewhere.
    ends = frozenset(tokens[index] for index, tokens in solo(n=6).tokens.items() if index)
    stopped = solo(n=6, logprobs=0, stop_token_ids=ends)
    by_mean = sorted(range(6), key=lambda index: -means(stopped)[index])
    sums = [mean * len(stopped.tokens[index]) for index, mean in enumerate(means(stopped))]
    assert sorted(range(6), key=lambda index: -sums[index])[:5] != by_mean[:5]
    best = solo(n=5, best_of=6, stop_token_ids=ends)
    assert [best.tokens[rank] for rank in range(5)] == [stopped.tokens[index] for index in by_mean[:5]]
    assert best.usage.completion_tokens == sum(map(len, stopped.tokens.values()))


def test_as_many_as_asked_for_are_streamed_as_ever(solo):
    assert [output.tokens for output in solo(n=2, best_of=2).outputs] == [
        output.tokens for output in solo(n=2).outputs
    ]


def test_preempted_choices_are_compared_all_the_same(tiny_engine, ask, run_all, solo):
    engine = tiny_engine(num_blocks=12, max_batch_tokens=16, max_num_seqs=8)
    best = run_all(engine, [ask("r", PROMPT, n=2, best_of=6, **DRAWN)])["r"]
    assert engine.scheduler.preemptions > 0
    assert best.tokens == solo(n=2, best_of=6).tokens


def test_fewer_than_asked_for_or_too_many_are_refused():
    for best_of in (1, 129, 2.5):
        with pytest.raises(InvalidRequest, match="best_of"):
            SamplingParams(n=2, best_of=best_of)
