"""From logits to tokens: exact edge cases, filters against a plain implementation, distributions, seeds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.request import SamplingParams
from replica.sampler import Row, sample, uniform

PROMPT = np.array([0, 1, 2], dtype=np.int32)


def row(seed=0, outputs=(), prompt=PROMPT, forbidden=frozenset(), **params):
    return Row(SamplingParams(max_tokens=1000, **params), seed, prompt, outputs, forbidden)


def draw(logits, *rows):
    return sample(torch.tensor(logits, dtype=torch.float32), rows).tokens


def allowed(probs, top_k=0, top_p=1.0, min_p=0.0):
    """Plain reference: ids that pass, in order of probability."""
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if 0 < top_k < len(order):
        order = order[:top_k]
    total, kept, before = sum(probs[i] for i in order), [], 0.0
    for i in order:
        if kept and (before >= top_p * total or probs[i] < min_p * probs[order[0]]):
            break
        kept.append(i)
        before += probs[i]
    return kept


def reachable(probs, **params):
    """Ids that are drawn for any of many evenly spread uniform numbers, by counting over seeds."""
    rows = [row(seed, temperature=1.0, **params) for seed in range(4000)]
    logits = torch.tensor(probs).log().expand(len(rows), -1)
    return np.bincount(sample(logits, rows).tokens, minlength=len(probs)) / len(rows)


def test_greedy_takes_the_highest_logit_and_the_lowest_id_among_equals():
    assert draw([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]], row(temperature=0), row(temperature=0)) == [1, 0]


def test_a_temperature_near_zero_is_greedy():
    assert draw([[0.0, 1e-3]], row(temperature=1e-300)) == [1]
    assert draw([[0.0, 1e-1]], row(temperature=2e-5)) == [1]


def test_huge_logits_and_minus_infinity_do_not_break_a_draw():
    assert draw([[3e38, -3e38, -math.inf]], row(temperature=0.5)) == [0]


def test_nan_logits_are_reported_and_leave_the_neighbour_alone():
    logits = [[math.nan, 1.0], [0.0, 1.0], [1.0, math.nan]]
    assert draw(logits, row(temperature=0), row(temperature=0), row(temperature=1.0)) == [-1, 1, -1]
    assert draw([[math.inf, 1.0], [0.0, 9.0]], row(temperature=1.0), row(temperature=1.0)) == [-1, 1]
    assert draw([[1.0]], row(forbidden=frozenset({0}))) == [-1]


def test_top_k_one_and_a_tiny_top_p_are_greedy_even_with_ties():
    logits = [[1.0, 2.0, 2.0, 0.0]]
    for seed in range(50):
        assert draw(logits, row(seed, top_k=1)) == [1]
        assert draw(logits, row(seed, top_p=1e-9)) == [1]
        assert draw(logits, row(seed, min_p=1.0, top_k=1)) == [1]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.5, 0.25, 0.125, 0.125]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 100}, [0.5, 0.25, 0.125, 0.125]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.8}, [4 / 7, 2 / 7, 1 / 7, 0]),
        ({"min_p": 0.5}, [2 / 3, 1 / 3, 0, 0]),
        ({"min_p": 0.26}, [2 / 3, 1 / 3, 0, 0]),
        ({"min_p": 0.25}, [0.5, 0.25, 0.125, 0.125]),
        ({"top_k": 3, "top_p": 0.5}, [1, 0, 0, 0]),  # of the three that are left, the first has 4/7
        ({"top_k": 3, "top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
    ],
)
def test_filters_keep_the_right_tokens_in_the_right_proportions(params, expected):
    frequency = reachable([0.5, 0.25, 0.125, 0.125], **params)
    assert [f > 0 for f in frequency] == [e > 0 for e in expected]
    assert np.abs(frequency - expected).max() < 0.03


@given(
    weights=st.lists(st.integers(1, 50), min_size=2, max_size=12),
    top_k=st.integers(0, 13),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_draw_passes_the_filters_of_a_plain_implementation(weights, top_k, top_p, min_p, seed):
    probs = torch.softmax(torch.tensor(weights).log(), 0)
    params = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    token = sample(torch.tensor([weights]).log(), [row(seed, **params)]).tokens[0]
    # A hair's breadth for sums of rounded numbers.
    generous = {"top_k": top_k, "top_p": min(1.0, top_p + 1e-5), "min_p": max(0.0, min_p - 1e-5)}
    assert token in allowed(probs.tolist(), **generous)


def test_frequencies_follow_the_temperature():
    weights = torch.tensor([0.5, 0.3, 0.2])
    rows = [row(seed, temperature=2.0) for seed in range(4000)]
    frequency = np.bincount(sample(weights.log().expand(len(rows), -1), rows).tokens) / len(rows)
    expected = weights.sqrt() / weights.sqrt().sum()
    assert np.abs(frequency - expected.numpy()).max() < 0.025


def test_one_choice_draws_evenly_along_its_positions():
    rows = [row(7, outputs=range(position)) for position in range(4000)]
    frequency = np.bincount(sample(torch.zeros(len(rows), 4), rows).tokens) / len(rows)
    assert np.abs(frequency - 0.25).max() < 0.03


def test_uniform_numbers_are_below_one_and_depend_on_seed_and_position():
    values = uniform(np.arange(1000, dtype=np.uint64), np.zeros(1000, dtype=np.uint64))
    assert 0 <= values.min() < 0.01
    assert 0.99 < values.max() < 1
    assert len(set(values)) == 1000
    assert uniform([2**64 - 1, 5], [3, 9]).tolist() == [
        uniform([2**64 - 1], [3])[0],
        uniform([5], [9])[0],
    ]


def test_the_draw_depends_on_the_position_and_not_on_who_wrote_the_tokens_before():
    logits = torch.zeros(1, 1000)
    whole = np.arange(8, dtype=np.int32)
    as_prompt = sample(logits, [row(5, prompt=whole)]).tokens
    as_output = sample(logits, [row(5, prompt=whole[:3], outputs=whole[3:].tolist())]).tokens
    assert as_prompt == as_output
    assert as_prompt != sample(logits, [row(5, prompt=whole[:7])]).tokens


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 5.0]),
        "top_k": st.sampled_from([0, 1, 3, 40]),
        "top_p": st.sampled_from([1.0, 0.9, 0.2]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logprobs": st.sampled_from([None, 0, 2]),
    }
)


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(PARAMS, st.integers(0, 2**64 - 1)), min_size=1, max_size=8),
    noise=st.integers(0, 99),
)
def test_a_row_is_drawn_the_same_alone_and_in_any_batch(rows, noise):
    logits = torch.randn(len(rows), 333, generator=torch.Generator().manual_seed(noise)) * 3
    logits[:, 100:120] = 2.5  # ties
    rows = [row(seed, outputs=[5, 5, 110], **params) for params, seed in rows]
    together = sample(logits, rows)
    for i, one in enumerate(rows):
        alone = sample(logits[i : i + 1], [one])
        assert (alone.tokens[0], alone.logprobs[0]) == (together.tokens[i], together.logprobs[i])


def test_penalties_change_the_logits_as_documented():
    logits = [[4.0, 3.0, -1.0, 3.5]]
    assert draw(logits, row(temperature=0, presence_penalty=1.0, outputs=[0, 0])) == [3]
    assert draw(logits, row(temperature=0, frequency_penalty=0.4, outputs=[0])) == [0]
    assert draw(logits, row(temperature=0, frequency_penalty=0.4, outputs=[0, 0])) == [3]
    prompt = np.array([0], dtype=np.int32)
    assert draw(logits, row(temperature=0, repetition_penalty=1.2, prompt=prompt)) == [3]  # 4 / 1.2 < 3.5
    assert draw(logits, row(temperature=0, presence_penalty=2.0, prompt=prompt)) == [
        0
    ]  # prompts do not count
    negative = [[-1.0, -1.1]]
    assert draw(negative, row(temperature=0, repetition_penalty=1.2, prompt=prompt)) == [1]  # -1 * 1.2 < -1.1


def test_penalties_touch_neither_the_neighbour_nor_the_callers_logits():
    logits = torch.tensor([[4.0, 3.5], [4.0, 3.5]])
    assert sample(
        logits, [row(temperature=0, presence_penalty=1.0, outputs=[0]), row(temperature=0)]
    ).tokens == [1, 0]
    assert logits.tolist() == [[4.0, 3.5], [4.0, 3.5]]


def test_forbidden_tokens_never_come():
    assert draw([[9.0, 1.0, 0.0]], row(temperature=0, forbidden=frozenset({0}))) == [1]
    for seed in range(50):
        assert draw([[9.0, 1.0, -1.0]], row(seed, temperature=1.0, forbidden=frozenset({0, 2}))) == [1]


def test_logprobs_are_the_models_own_whatever_the_filters():
    probs = [0.5, 0.25, 0.125, 0.125]
    rows = [
        row(temperature=0, logprobs=3, presence_penalty=2.0, outputs=[0]),
        row(temperature=0, logprobs=0),
        row(),
    ]
    found = sample(torch.tensor(probs).log().expand(3, -1), rows)
    assert found.tokens[:2] == [1, 0]
    first, second, third = found.logprobs
    assert first.chosen == pytest.approx(math.log(0.25), abs=1e-6)
    assert [token for token, _ in first.top] == [0, 1, 2]
    assert [value for _, value in first.top] == pytest.approx([math.log(p) for p in probs[:3]], abs=1e-6)
    assert (second.chosen, second.top) == (pytest.approx(math.log(0.5), abs=1e-6), ())
    assert third is None


def test_more_logprobs_than_tokens_gives_all_of_them():
    found = sample(torch.tensor([[1.0, 2.0, -math.inf]]), [row(temperature=0, logprobs=50)])
    assert [token for token, _ in found.logprobs[0].top] == [1, 0, 2]


def test_top_logprobs_break_ties_by_id():
    found = sample(torch.tensor([[1.0, 2.0, 2.0, 2.0]]), [row(temperature=0, logprobs=2)])
    assert [token for token, _ in found.logprobs[0].top] == [1, 2]


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
def test_any_vocabulary_size_can_be_drawn_from_end_to_end(size):
    logits = torch.full((400, size), -math.inf)
    last = torch.arange(400) % 2 == 0
    logits[last, -1], logits[~last, 0] = 0.0, 0.0
    tokens = sample(logits, [row(seed) for seed in range(400)]).tokens
    assert tokens == [size - 1 if is_last else 0 for is_last in last.tolist()]


def test_half_precision_logits_are_fine():
    assert sample(torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16), [row(top_p=0.5)]).tokens == [1]
