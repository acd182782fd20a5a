"""What a step computes, and what it costs."""

from dataclasses import replace

from replica.plan import work
from replica.random_model import tiny_config


def test_attention_is_counted_by_the_context_of_each_token():
    assert work(0, 100, 1000) == 100 * 1.05
    assert work(0, 60, 1000) + work(60, 40, 1000) == work(0, 100, 1000), "chunks add up"
    assert work(500, 100, 1000) == 100 * 1.55


def test_the_context_that_costs_as_much_as_all_else():
    config = tiny_config()
    matrices = 64 * (4 + 2 * 2) * 16 + 4 * 16 * 64 + 3 * 64 * 128
    assert config.attention_tokens == matrices // (2 * 4 * 16)
    windowed = replace(config, sliding_window=8, window_layers=frozenset({0}))
    assert windowed.attention_tokens == 2 * matrices // (2 * 4 * 16), (
        "one of two layers attends to everything"
    )
