"""How large steps are after the memory has run out."""

from replica.step_budget import StepBudget


def test_half_each_time_down_to_the_least():
    budget = StepBudget(100, 30)
    assert budget.halve() and budget.tokens == 50
    assert budget.halve() and budget.tokens == 30
    assert not budget.halve() and budget.tokens == 30


def test_it_grows_again_after_good_steps():
    budget = StepBudget(100, 30)
    budget.halve()
    budget.halve()
    for _ in range(255):
        budget.passed()
    assert budget.tokens == 30
    budget.passed()
    assert budget.tokens == 60
    for _ in range(255):
        budget.passed()
    budget.halve()
    assert budget.tokens == 30
    for _ in range(512):
        budget.passed()
    assert budget.tokens == 100


def test_trouble_starts_the_count_anew():
    budget = StepBudget(64, 16)
    budget.halve()
    for _ in range(255):
        budget.passed()
    budget.halve()
    budget.passed()
    assert budget.tokens == 16
