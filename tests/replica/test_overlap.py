"""Steps launched while another one runs: the same answers, nothing lost, whatever happens meanwhile."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.errors import EngineDead
from replica.request import Failure

PROMPT = list(range(10, 40))


class Watched:
    """The real model, which takes note of what is launched ahead, and fails or gives NaN where told to."""

    def __init__(self, model):
        self._model, self.config = model, model.config
        self.calls, self.ahead, self.errors, self.nan = 0, [], {}, {}

    def copy_blocks(self, copies):
        self._model.copy_blocks(copies)

    def forward(self, batch, drawn=None):
        call, self.calls = self.calls, self.calls + 1
        self.ahead.append(int((batch.token_ids < 0).sum()))
        if call in self.errors:
            raise self.errors[call]
        logits = self._model.forward(batch, drawn)
        for row in self.nan.get(call, ()):
            logits[row] = float("nan")
        return logits


@pytest.fixture
def engine(tiny_engine):
    """An engine that overlaps, and its watched model."""

    def build(**options):
        found = tiny_engine(**{"overlap": True, **options})
        found._runner._model = Watched(found._runner._model)
        return found, found._runner._model

    return build


def assert_idle(engine):
    engine.cache.check()
    stats = engine.cache.stats()
    assert (stats.held, stats.leases, stats.free + stats.cached) == (0, 0, stats.num_blocks)
    assert not engine.has_work()


WORKLOADS = {
    "greedy": ({}, [{}, {"max_tokens": 1}, {"max_tokens": 20}]),
    "seeded": ({}, [{"temperature": 2.0, "seed": seed, "top_k": 40} for seed in range(4)]),
    "stops": ({}, [{"stop_token_ids": frozenset(range(0, 259, 9)), "max_tokens": 30}, {"stop": ("e",)}]),
    "choices that stop": (
        {},
        [{"n": 4, "temperature": 3.0, "seed": 5, "stop_token_ids": frozenset(range(0, 259, 5))}] * 2,
    ),
    "some need the host": (
        {},
        [{"logprobs": 2}, {}, {"repetition_penalty": 1.5}, {"min_tokens": 3, "max_tokens": 9}],
    ),
    "choices": ({}, [{"n": 3, "temperature": 3.0, "seed": 5}, {"max_tokens": 12}]),
    "best of": ({}, [{"n": 1, "best_of": 3, "temperature": 3.0, "seed": 5}, {"max_tokens": 12}]),
    "beams": ({"num_blocks": 64}, [{"n": 2, "use_beam_search": True}, {"max_tokens": 12}]),
    "preemption": ({"num_blocks": 22}, [{"max_tokens": 30}] * 4),
    "chunks": ({"max_batch_tokens": 8, "max_num_seqs": 3}, [{"max_tokens": 5 + i} for i in range(5)]),
    "drafts": ({"draft_tokens": 3}, [{"max_tokens": 20}] * 2),
    "to the limit": ({"max_model_len": 35}, [{"max_tokens": 50}] * 2),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_answers_are_the_same(tiny_engine, ask, run_all, name):
    options, params = WORKLOADS[name]
    found = []
    for overlap in (False, True):
        subject = tiny_engine(**options, overlap=overlap)
        prompts = [[*PROMPT[: 12 + 4 * i], 100 + i, 3] for i in range(len(params))]
        requests = [ask(str(i), prompts[i], **given) for i, given in enumerate(params)]
        results = run_all(subject, requests)
        found.append(
            {
                key: (result.tokens, result.text, result.reason, result.usage.completion_tokens)
                for key, result in results.items()
            }
        )
        if name == "preemption":
            assert subject.scheduler.preemptions > 0
        assert_idle(subject)
    assert found[0] == found[1]


def test_decodes_go_ahead_and_no_row_is_wasted_at_a_known_end(engine, ask, run_all):
    subject, model = engine()
    result = run_all(subject, [ask("r", PROMPT, max_tokens=6)])["r"]
    assert len(result.tokens[0]) == 6
    # The prompt, then 5 decodes, each launched before the one before it was collected.
    assert model.ahead == [0, 1, 1, 1, 1, 1]


def test_a_stop_that_comes_as_a_surprise_wastes_one_row(engine, ask, run_all):
    subject, model = engine()
    whole = run_all(subject, [ask("r", PROMPT, max_tokens=8)])["r"].tokens[0]
    end = next(i for i in range(2, 8) if whole[i] not in whole[:i])
    before = model.calls
    result = run_all(subject, [ask("r", PROMPT, max_tokens=8, stop_token_ids=frozenset({whole[end]}))])["r"]
    assert (result.tokens[0], result.reason[0]) == (whole[: end + 1], "stop")
    assert model.calls - before == end + 2
    assert_idle(subject)


def test_what_is_cached_is_what_was_drawn(engine, ask, run_all):
    """Blocks of an answer are hit by whoever continues it; what is in them came later than they did."""
    subject, _ = engine()
    answer = run_all(subject, [ask("r", PROMPT, max_tokens=15)])["r"].tokens[0]
    again = run_all(subject, [ask("again", [*PROMPT, *answer, 7])])["again"]
    assert again.usage.cached_tokens == 44


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("n", [1, 3])
def test_an_abort_at_any_step_leaves_nothing_behind(engine, ask, run_all, steps, n):
    subject, _ = engine(max_batch_tokens=16, max_num_seqs=16)
    alone = run_all(subject, [ask("other", [*PROMPT, 5, 6])])["other"].tokens
    subject.clear_cache()
    subject.add(ask("r", PROMPT, n=n))
    subject.add(ask("other", [*PROMPT, 5, 6]))
    for _ in range(steps):
        subject.step()
    assert subject.abort("r")
    subject.cache.check()
    subject.add(ask("r", [8, 9], max_tokens=3))  # the same id, while a step of the old request may be running
    results = run_all(subject)
    assert len(results["r"].tokens[0]) == 3
    assert steps > 2 or results["other"].tokens == alone
    assert_idle(subject)


def test_a_step_that_fails_at_launch_does_not_take_the_running_one_along(engine, ask, run_all):
    subject, model = engine()
    model.errors = {2: RuntimeError("no")}
    result = run_all(subject, [ask("r", PROMPT)])["r"]
    message = "the engine failed while computing this request: RuntimeError: no"
    assert (len(result.tokens[0]), result.failure) == (2, Failure("internal", message))
    assert_idle(subject)


def test_a_token_that_could_not_be_drawn_is_not_gone_on_with(engine, ask, run_all):
    subject, model = engine()
    model.nan = {1: [0]}
    results = run_all(subject, [ask("a", [1, 2]), ask("b", PROMPT)])
    assert "NaN" in results["a"].failure.message
    assert len(results["b"].tokens[0]) == 8
    assert_idle(subject)


# --- The device runs out of memory. ---


@pytest.mark.parametrize("overlap", [False, True])
def test_out_of_memory_fails_the_step_and_the_next_ones_are_smaller(engine, ask, run_all, overlap):
    subject, model = engine(overlap=overlap, max_batch_tokens=64, max_num_seqs=8)
    model.errors = {0: torch.OutOfMemoryError("CUDA out of memory")}
    failed = run_all(subject, [ask("r", PROMPT)])["r"].failure
    assert failed == Failure(
        "internal",
        "the device ran out of memory in a step of 30 tokens; this replica needs a lower max_batch_tokens "
        "(64) or memory_share (0.9)",
    )
    assert subject.scheduler.max_batch_tokens == 32
    run_all(subject, [ask("s", PROMPT, max_tokens=255)])
    assert subject.scheduler.max_batch_tokens == 32
    run_all(subject, [ask("t", PROMPT, max_tokens=8)])
    assert subject.scheduler.max_batch_tokens == 64
    assert_idle(subject)


def test_an_engine_that_has_no_smaller_steps_left_gives_up(engine, ask, run_all):
    subject, model = engine(max_batch_tokens=32, max_num_seqs=8, max_failed_steps=2)
    model.errors = dict.fromkeys(range(9), torch.OutOfMemoryError("CUDA out of memory"))
    for size in (16, 8, 8):
        run_all(subject, [ask("r", PROMPT)])
        assert subject.scheduler.max_batch_tokens == size
    subject.add(ask("r", PROMPT))
    with pytest.raises(EngineDead, match="2 steps in a row"):
        subject.step()


# --- Any history. ---

REQUESTS = st.fixed_dictionaries(
    {
        "length": st.integers(1, 26),
        "shared": st.booleans(),
        "max_tokens": st.integers(1, 12),
        "n": st.sampled_from([1, 1, 1, 2]),
        "temperature": st.sampled_from([0.0, 2.0]),
        "logprobs": st.sampled_from([None, None, 1]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.0]),
        "stop_token_ids": st.sampled_from([frozenset(), frozenset(range(0, 259, 7))]),
        "wait": st.integers(0, 4),
        "abort_after": st.none() | st.integers(0, 9),
    }
)


def history(subject, ask, wanted):
    """Run requests that come and go; what each was answered, apart from those that were aborted."""
    found, aborts, step = {}, {}, 0
    arrivals = np.cumsum([one["wait"] for one in wanted]).tolist()
    while step <= max(arrivals) or subject.has_work():
        for i, one in enumerate(wanted):
            if arrivals[i] == step:
                names = ("max_tokens", "n", "temperature", "logprobs", "presence_penalty", "stop_token_ids")
                tokens = [(j if one["shared"] else j + 31 * i) % 250 + 3 for j in range(one["length"])]
                subject.add(ask(str(i), tokens, seed=i, **{name: one[name] for name in names}))
                if one["abort_after"] is not None:
                    aborts.setdefault(step + one["abort_after"], []).append(str(i))
        for name in aborts.pop(step, ()):
            subject.abort(name)
        for output in subject.step():
            assert output.failure is None
            found.setdefault(output.request_id, {}).setdefault(output.index, []).extend(output.tokens)
        subject.cache.check()
        step += 1
        assert step < 2000
    assert_idle(subject)
    return {i: found.get(str(i)) for i, one in enumerate(wanted) if one["abort_after"] is None}


@settings(max_examples=40, deadline=None)
@given(wanted=st.lists(REQUESTS, min_size=1, max_size=6), blocks=st.sampled_from([12, 20, 64]))
def test_any_history_gives_the_same_answers(tiny_engine, ask, wanted, blocks):
    options = {"num_blocks": blocks, "max_batch_tokens": 12, "max_num_seqs": 4}
    answers = [history(tiny_engine(**options, overlap=overlap), ask, wanted) for overlap in (False, True)]
    assert answers[0] == answers[1]
