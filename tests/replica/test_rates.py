"""Speeds learnt from steps."""

import pytest

from replica.rates import PRIOR_STEP_S, PRIOR_TOKENS_PER_S, Rates


def test_guesses_stand_in_before_the_first_step():
    rates = Rates()
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (PRIOR_TOKENS_PER_S, PRIOR_STEP_S)


def test_the_first_large_prefill_outweighs_the_guess():
    rates = Rates()
    rates.record(512, 0, 0.1)
    assert rates.prefill_tokens_per_s == pytest.approx(5120, rel=0.15)


def test_a_warm_prompts_few_tokens_hardly_count():
    rates = Rates()
    rates.record(512, 0, 0.1)
    before = rates.prefill_tokens_per_s
    for _ in range(5):
        rates.record(2, 0, 0.002)
    assert rates.prefill_tokens_per_s == pytest.approx(before, rel=0.1)


def test_old_speeds_are_forgotten():
    rates = Rates()
    for _ in range(50):
        rates.record(512, 0, 0.1)
    for _ in range(50):
        rates.record(512, 0, 1.0)
    assert rates.prefill_tokens_per_s == pytest.approx(512, rel=0.1)


def test_decode_steps_are_averaged():
    rates = Rates()
    rates.record(0, 4, 0.1)
    assert rates.decode_step_s == pytest.approx(0.1)
    rates.record(0, 4, 0.2)
    assert rates.decode_step_s == pytest.approx(0.11)


def test_a_mixed_steps_decodes_are_taken_off_the_prefill():
    rates = Rates()
    for _ in range(30):
        rates.record(0, 8, 0.05)
        rates.record(500, 8, 0.15)
    assert rates.prefill_tokens_per_s == pytest.approx(5000, rel=0.02)
    assert rates.decode_step_s == pytest.approx(0.05)


def test_a_step_of_no_time_divides_by_nothing():
    rates = Rates()
    rates.record(16, 4, 0.0)
    rates.record(0, 0, 0.0)
    assert rates.prefill_tokens_per_s > 0
