"""Choices that share a prompt's blocks, whatever the cache may be used for."""

import pytest

PROMPT = list(range(10, 40))
DRAWN = {"temperature": 3.0, "seed": 11, "max_tokens": 12}


@pytest.fixture
def alone(tiny_engine, ask, run_all):
    """Each choice's tokens when all have room."""
    return run_all(tiny_engine(), [ask("r", PROMPT, n=5, **DRAWN)])["r"].tokens


def assert_idle(engine):
    engine.cache.check()
    stats = engine.cache.stats()
    assert (stats.held, stats.leases, stats.free + stats.cached) == (0, 0, stats.num_blocks)


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("publish", [True, False])
def test_one_prefill_and_the_same_draws_with_and_without_the_cache(
    tiny_engine, ask, run_all, alone, read, publish
):
    engine = tiny_engine()
    engine.add(ask("r", PROMPT, n=5, read=read, publish=publish, **DRAWN))
    assert [(output.index, output.tokens) for output in engine.step()] == [
        (index, (tokens[0],)) for index, tokens in alone.items()
    ]
    assert engine.load()["held"] == 8  # one prompt's blocks for five choices
    rest = run_all(engine)["r"]
    assert {index: [alone[index][0], *tokens] for index, tokens in rest.tokens.items()} == alone
    stats = engine.cache.stats()
    assert (stats.missed_tokens, stats.forks) == (30, 4)
    assert stats.cached == 0 if not publish else stats.cached > 7
    assert_idle(engine)


@pytest.mark.parametrize("publish", [True, False])
def test_preempted_choices_are_computed_again_alone(tiny_engine, ask, run_all, alone, publish):
    engine = tiny_engine(num_blocks=13, max_batch_tokens=16, max_num_seqs=8)
    result = run_all(engine, [ask("r", PROMPT, n=5, read=publish, publish=publish, **DRAWN)])["r"]
    assert engine.scheduler.preemptions > 0
    assert result.tokens == alone
    assert_idle(engine)


def test_choices_beyond_what_may_run_wait_with_the_token_they_drew(tiny_engine, ask, run_all, alone):
    engine = tiny_engine(max_num_seqs=2)
    engine.add(ask("r", PROMPT, n=5, **DRAWN))
    assert len(engine.step()) == 5
    assert (engine.load()["running"], engine.load()["waiting"]) == (2, 3)
    rest = run_all(engine)["r"]
    assert {index: [alone[index][0], *tokens] for index, tokens in rest.tokens.items()} == alone
    assert_idle(engine)


def test_a_prompt_computed_in_chunks_or_preempted_before_its_end_forks_at_its_end(
    tiny_engine, ask, run_all, alone
):
    engine = tiny_engine(num_blocks=11, max_batch_tokens=8, max_num_seqs=8)
    # The older one grows into the blocks of the choices' prompt.
    old = ask("old", range(100, 108), max_tokens=30)
    results = run_all(engine, [old, ask("r", PROMPT, n=5, **DRAWN)])
    assert results["r"].tokens == alone
    assert len(results["old"].tokens[0]) == 30
    assert_idle(engine)


def test_choices_that_end_with_their_first_token_leave_nothing(tiny_engine, ask, run_all):
    engine = tiny_engine()
    result = run_all(engine, [ask("r", PROMPT, n=4, max_tokens=1)])["r"]
    assert result.reason == dict.fromkeys(range(4), "length")
    assert_idle(engine)


def test_waiting_choices_count_in_the_line(tiny_engine, ask):
    engine = tiny_engine(max_batch_tokens=8, max_num_seqs=8)
    engine.add(ask("r", PROMPT, n=4))
    assert engine.load()["waiting"] == 4
    engine.step()
    assert (engine.load()["running"], engine.load()["waiting"]) == (1, 3)
    assert engine.load()["waiting_tokens"] == 22
