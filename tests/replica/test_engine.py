"""The engine on the tiny random model: limits, stops, choices, log-probabilities, aborts, failing steps."""

import numpy as np
import pytest

from kvcore.namespace import Namespace
from replica.answer import Streamed
from replica.config import EngineConfig
from replica.errors import ConfigError, EngineDead, InvalidRequest, QueueFull
from replica.request import Failure, Usage

PROMPT = list(range(10, 40))


@pytest.fixture
def solo(tiny_engine, ask, run_all):
    """Runs one request on an engine of its own."""

    def run(*args, engine=None, **params):
        return run_all(engine or tiny_engine(), [ask("r", *args, **params)])["r"]

    return run


def idle(engine):
    engine.cache.check()
    stats = engine.cache.stats()
    return stats.held == 0 and stats.free + stats.cached == stats.num_blocks and not engine.has_work()


# --- Answers and why they end. ---


def test_an_answer_has_start_usage_and_exactly_max_tokens(solo, tiny_engine):
    engine = tiny_engine()
    result = solo(PROMPT, engine=engine, max_tokens=5)
    assert (len(result.tokens[0]), result.reason[0]) == (5, "length")
    assert result.usage == Usage(30, 5, 0)
    assert (result.start.prompt_tokens, result.start.cached_tokens) == (30, 0)
    assert (result.start.epoch, result.outputs[0].start) == (engine.cache.epoch, result.start)
    assert [o.start for o in result.outputs[1:]] == [None] * 4
    assert result.text[0] == engine.tokenizer.decode(result.tokens[0])
    assert idle(engine)


def test_the_start_carries_the_caches_number_after_the_prompt_was_committed(tiny_engine, ask):
    engine = tiny_engine()
    before = engine.cache.seq
    engine.add(ask("r", PROMPT))
    [output] = engine.step()
    assert output.start.seq == engine.cache.seq > before
    tokens = np.array([*PROMPT, 1], dtype=np.int32)
    layout = engine.facts
    assert engine.cache.probe(tokens, Namespace(layout.digest, layout.layout)) == 28


def test_a_stop_token_ends_the_answer_and_gives_no_text(solo):
    whole = solo(PROMPT, max_tokens=6)
    tokens = whole.tokens[0]
    end = next(i for i in range(1, 6) if tokens[i] not in tokens[:i])
    stopped = solo(PROMPT, max_tokens=6, stop_token_ids=frozenset({tokens[end], 10**9}))
    assert (stopped.tokens[0], stopped.reason[0]) == (tokens[: end + 1], "stop")
    assert stopped.text[0] == solo(PROMPT, max_tokens=end).text[0]


def test_end_of_text_ends_the_answer_unless_it_is_to_be_ignored(solo, tiny_engine):
    whole = solo(PROMPT, max_tokens=6).tokens[0]
    engine = tiny_engine()
    engine.tokenizer.eos_ids = frozenset({whole[1]})
    ended = solo(PROMPT, engine=engine, max_tokens=6, ignore_eos=False)
    at = whole.index(whole[1])
    assert (ended.tokens[0], ended.reason[0]) == (whole[: at + 1], "stop")
    ignored = solo(PROMPT, engine=engine, max_tokens=6, ignore_eos=True)
    assert (ignored.tokens[0], ignored.reason[0]) == (whole, "length")


def test_nothing_ends_an_answer_before_min_tokens(solo):
    whole = solo(PROMPT, max_tokens=6).tokens[0]
    result = solo(PROMPT, max_tokens=6, min_tokens=3, stop_token_ids=frozenset(whole))
    assert len(result.tokens[0]) >= 3
    assert not set(result.tokens[0][:3]) & set(whole)


def test_a_stop_string_ends_the_text_before_it(solo):
    whole = solo(PROMPT, max_tokens=30).text[0]
    stop = whole[5:8]
    result = solo(PROMPT, max_tokens=30, stop=(stop,))
    assert (result.text[0], result.reason[0]) == (whole[: whole.index(stop)], "stop")
    unsure = solo(PROMPT, max_tokens=4, stop=(solo(PROMPT, max_tokens=4).text[0] + "never",))
    assert (unsure.text[0], unsure.reason[0]) == (solo(PROMPT, max_tokens=4).text[0], "length")


def test_the_context_limit_ends_an_answer(tiny_engine, solo):
    engine = tiny_engine(max_model_len=33)
    result = solo(PROMPT, engine=engine, max_tokens=50)
    assert (len(result.tokens[0]), result.reason[0]) == (3, "length")


def test_choices_share_one_prefill_and_draw_on_their_own(solo, tiny_engine):
    engine = tiny_engine()
    result = solo(PROMPT, engine=engine, n=4, temperature=3.0, seed=11, max_tokens=12)
    assert sorted(result.reason) == [0, 1, 2, 3]
    assert len({tuple(tokens) for tokens in result.tokens.values()}) == 4
    assert result.usage == Usage(30, 48, 0)
    assert engine.cache.stats().missed_tokens == 30
    alone = solo(PROMPT, temperature=3.0, seed=11, max_tokens=12)
    assert alone.tokens[0] == result.tokens[0]


def test_requests_without_a_seed_differ(tiny_engine, ask, run_all):
    requests = [ask(str(i), PROMPT, temperature=3.0, max_tokens=12) for i in range(4)]
    results = run_all(tiny_engine(), requests)
    assert len({tuple(result.tokens[0]) for result in results.values()}) == 4


def test_logprobs_name_the_chosen_token_and_its_rivals(solo, tiny_engine):
    engine = tiny_engine()
    result = solo(PROMPT, engine=engine, max_tokens=3, logprobs=2)
    for output, token in zip(result.outputs, result.tokens[0], strict=True):
        [entry] = output.logprobs
        piece = engine.tokenizer.token_bytes(token)
        assert (entry["id"], entry["bytes"]) == (token, list(piece))
        assert entry["token"] == piece.decode("utf-8", "replace")
        assert entry["top"][0]["id"] == token  # greedy
        assert entry["top"][0]["logprob"] == entry["logprob"] >= entry["top"][1]["logprob"]
    assert all(o.logprobs is None for o in solo(PROMPT, max_tokens=3).outputs)


# --- The cache, as callers see it. ---


def test_cached_tokens_is_what_the_first_claim_of_the_first_choice_found(tiny_engine, ask, run_all):
    engine = tiny_engine()
    run_all(engine, [ask("cold", PROMPT, max_tokens=1)])
    again = run_all(engine, [ask("again", PROMPT, n=2)])["again"]
    assert (again.usage.cached_tokens, again.start.cached_tokens) == (28, 28)
    longer = run_all(engine, [ask("longer", [*PROMPT[:20], *range(100, 120)])])["longer"]
    assert longer.usage.cached_tokens == 20


def test_preemption_does_not_inflate_cached_tokens(tiny_engine, ask, run_all):
    engine = tiny_engine(num_blocks=14)
    requests = [ask(str(i), range(30 * i, 30 * i + 12), max_tokens=30) for i in range(3)]
    results = run_all(engine, requests)
    assert engine.scheduler.preemptions > 0
    assert [results[str(i)].usage for i in range(3)] == [Usage(12, 30, 0)] * 3
    assert idle(engine)


def test_what_must_not_be_read_or_published_is_not(tiny_engine, ask, run_all):
    engine = tiny_engine()
    run_all(engine, [ask("hidden", PROMPT, publish=False)])
    assert engine.cache.stats().cached == 0
    run_all(engine, [ask("shown", PROMPT)])
    assert run_all(engine, [ask("blind", PROMPT, read=False)])["blind"].usage.cached_tokens == 0
    assert run_all(engine, [ask("seeing", PROMPT)])["seeing"].usage.cached_tokens == 29


def test_tenants_do_not_share(tiny_engine, ask, run_all):
    engine = tiny_engine()
    run_all(engine, [ask("a", PROMPT, tenant="a")])
    assert run_all(engine, [ask("b", PROMPT, tenant="b")])["b"].usage.cached_tokens == 0
    assert run_all(engine, [ask("a", PROMPT, tenant="a")])["a"].usage.cached_tokens == 29


def test_hashes_of_another_secret_are_counted_and_not_used(tiny_engine, ask, run_all, caplog):
    engine = tiny_engine()
    wrong = ask("r", PROMPT)
    object.__setattr__(wrong, "hashes", np.arange(7, dtype=np.uint64))
    run_all(engine, [wrong])
    assert engine.hash_mismatches == 1
    assert "check the hash secret" in caplog.text
    assert run_all(engine, [ask("again", PROMPT)])["again"].usage.cached_tokens == 29


# --- Refusals. ---


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "empty"),
        (range(64), "must not exceed 64"),
        ([-1], "outside"),
        ([10**6], "outside"),
    ],
)
def test_impossible_requests_are_refused_and_change_nothing(tiny_engine, ask, tokens, message):
    engine = tiny_engine(num_blocks=16)
    with pytest.raises(InvalidRequest, match=message):
        engine.add(ask("r", tokens))
    assert idle(engine)


def test_a_prompt_larger_than_the_pool_is_refused_and_one_that_just_fits_runs(
    tiny_engine, ask, run_all, caplog
):
    engine = tiny_engine(num_blocks=16)
    assert engine.facts.context_length == 64
    assert "64 tokens, which is all the KV pool holds" in caplog.text
    result = run_all(engine, [ask("r", [i % 50 for i in range(63)], max_tokens=9)])["r"]
    assert (len(result.tokens[0]), result.reason[0]) == (1, "length")
    assert idle(engine)


def test_an_id_in_use_and_an_unknown_adapter_are_refused(tiny_engine, ask):
    engine = tiny_engine()
    engine.add(ask("r", PROMPT))
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add(ask("r", PROMPT))
    other = ask("s", PROMPT)
    object.__setattr__(other, "adapter", "lora")
    with pytest.raises(InvalidRequest, match="'lora' is not loaded"):
        engine.add(other)


def test_a_full_queue_refuses(tiny_engine, ask):
    engine = tiny_engine(max_queue=2, max_num_seqs=1)
    engine.add(ask("a", PROMPT))
    engine.step()
    engine.add(ask("b", PROMPT))
    engine.add(ask("c", PROMPT))
    with pytest.raises(QueueFull, match="2 of at most 2 sequences"):
        engine.add(ask("d", PROMPT))


def test_every_choice_counts_in_the_queue(tiny_engine, ask):
    engine = tiny_engine(max_queue=4, max_num_seqs=1)
    engine.add(ask("a", PROMPT, n=4))
    with pytest.raises(QueueFull, match="4 of at most 4 sequences"):
        engine.add(ask("b", PROMPT))
    engine.abort("a")
    engine.add(ask("c", PROMPT, n=2))
    with pytest.raises(QueueFull, match="2 of at most 4 sequences"):
        engine.add(ask("d", PROMPT, n=3))
    engine.check(ask("d", PROMPT, n=2))
    with pytest.raises(QueueFull, match="3 of at most 4 sequences"):
        engine.check(ask("d", PROMPT, n=2), arriving=1)
    with pytest.raises(InvalidRequest, match="n is 5; at most 4 choices can wait"):
        engine.add(ask("e", PROMPT, n=5))


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 0},
        {"num_blocks": 0},
        {"threads": 0},
        {"max_model_len": 1},
        {"max_batch_tokens": 8, "max_num_seqs": 9},
    ],
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EngineConfig(**settings)


def test_an_unknown_dtype_is_refused(tiny_engine):
    with pytest.raises(ConfigError, match="int8"):
        tiny_engine(dtype="int8")


# --- Aborts. ---


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_at_any_step_leaves_nothing_behind(tiny_engine, ask, run_all, steps):
    engine = tiny_engine(max_batch_tokens=16, max_num_seqs=16)
    engine.add(ask("r", PROMPT, n=3))
    engine.add(ask("other", [*PROMPT, 5, 6]))
    for _ in range(steps):
        engine.step()
    assert engine.abort("r")
    assert not engine.abort("r")
    engine.cache.check()
    results = run_all(engine)
    assert set(results) == {"other"}
    assert idle(engine)
    assert engine.load()["waiting_tokens"] == 0


# --- Failing steps. ---


class Faulty:
    """The real model, except that chosen forward passes fail or give NaN."""

    def __init__(self, model, fail=(), nan=()):
        self._model, self._fail, self._nan = model, fail, nan
        self.config, self.calls = model.config, 0

    def copy_blocks(self, copies):
        self._model.copy_blocks(copies)

    def forward(self, batch, drawn=None):
        self.calls += 1
        if self.calls - 1 in self._fail:
            raise RuntimeError("out of memory")
        logits = self._model.forward(batch, drawn)
        if self.calls - 1 in self._nan:
            logits[0] = float("nan")
        return logits


@pytest.fixture
def break_model():
    def apply(engine, **faults):
        engine._runner._model = Faulty(engine._runner._model, **faults)

    return apply


def test_a_failing_step_ends_its_requests_and_spares_the_others(
    tiny_engine, ask, run_all, break_model, caplog
):
    engine = tiny_engine(max_batch_tokens=30, max_num_seqs=1)
    break_model(engine, fail={1})
    results = run_all(engine, [ask("first", PROMPT), ask("second", PROMPT)])
    message = "the engine failed while computing this request: RuntimeError: out of memory"
    assert results["first"].failure == Failure("internal", message)
    assert (results["second"].reason[0], results["second"].usage.cached_tokens) == ("length", 28)
    assert "a step of 1 sequences failed" in caplog.text
    assert idle(engine)


def test_a_failing_step_never_publishes_what_it_did_not_compute(tiny_engine, ask, run_all, break_model):
    engine = tiny_engine()
    break_model(engine, fail={0})
    run_all(engine, [ask("first", PROMPT)])
    assert engine.cache.stats().cached == 0


def test_an_engine_that_fails_again_and_again_gives_up(tiny_engine, ask, run_all, break_model):
    engine = tiny_engine(max_failed_steps=2)
    break_model(engine, fail=range(9))
    engine.add(ask("a", PROMPT))
    assert engine.step()[0].failure is not None
    engine.add(ask("b", PROMPT))
    with pytest.raises(EngineDead, match="2 steps in a row"):
        engine.step()


def test_nan_logits_fail_one_request_only(tiny_engine, ask, run_all, break_model):
    engine = tiny_engine()
    break_model(engine, nan={1})  # the shorter prompt comes first
    results = run_all(engine, [ask("a", PROMPT, n=2), ask("b", [1, 2])])
    assert "NaN" in results["a"].failure.message
    assert results["b"].reason == {0: "length"}
    assert idle(engine)


def test_what_gave_nan_is_not_cached(tiny_engine, ask, run_all, break_model):
    engine = tiny_engine()
    break_model(engine, nan={0})
    assert "NaN" in run_all(engine, [ask("a", PROMPT)])["a"].failure.message
    assert engine.cache.stats().published == 0
    again = run_all(engine, [ask("b", PROMPT)])["b"]
    assert (again.usage.cached_tokens, again.reason) == (0, {0: "length"})


# --- Load. ---


def test_load_reports_what_routers_need(tiny_engine, ask, run_all):
    engine = tiny_engine(max_batch_tokens=16, max_num_seqs=16)
    engine.add(ask("a", PROMPT))
    engine.add(ask("b", range(100, 120)))
    engine.step()
    load = engine.load()
    expected = {"waiting": 1, "running": 1, "waiting_tokens": 14 + 20, "held": 8, "num_blocks": 512}
    assert {name: load[name] for name in expected} == expected
    assert load["prefill_tokens_per_s"] > 0
    run_all(engine)
    load = engine.load()
    assert (load["waiting"], load["running"], load["waiting_tokens"], load["held"]) == (0, 0, 0, 0)
    assert load["free"] + load["cached"] == 512


def test_cache_changes_reach_who_asks(tiny_engine, ask, run_all):
    engine = tiny_engine()
    first = engine.updates(None, 0)
    assert (first.snapshot, len(first.set_rows)) == (True, 0)
    assert engine.updates(first.epoch, first.seq) is None
    run_all(engine, [ask("a", PROMPT)])
    update = engine.updates(first.epoch, first.seq)
    assert (update.base_seq, update.seq) == (first.seq, engine.cache.seq)
    assert len(update.set_rows) > 0


def test_an_answer_is_built_per_request_not_per_choice(tiny_engine, ask):
    engine = tiny_engine()
    engine.add(ask("r", PROMPT, n=3))
    [answer] = engine._answers.values()
    assert isinstance(answer, Streamed)
    assert [seq.index for seq in answer.seqs] == [0, 1, 2]
