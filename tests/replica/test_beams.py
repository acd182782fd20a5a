"""Beam search: against a plain search over whole sequences, against transformers, and on a tiny pool."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.batch import ForwardBatch
from replica.beams import BeamSearch, candidates_kept
from replica.errors import InvalidRequest
from replica.models import load_model
from replica.random_model import RandomWeights, tiny_config
from replica.request import SamplingParams, Usage

PROMPTS = [list(range(10, 40)), [5, 6, 7], [200, 3, 200, 3, 200], list(range(60, 77))]
WIDTHS = [1, 2, 3, 5]


@pytest.fixture(scope="module")
def logprobs_of():
    """float32[V] after a list of tokens: the model alone, everything computed anew."""
    model, _ = load_model("random:tiny")
    model.allocate_kv(32, 4)
    known = {}

    def compute(tokens):
        if tuple(tokens) not in known:
            ids = np.array(tokens)
            logits = model.forward(ForwardBatch.build([(ids, 0, np.arange(-(-len(ids) // 4)), True)], 4))
            known[tuple(tokens)] = torch.log_softmax(logits[0], dim=0).numpy()
        return known[tuple(tokens)]

    return compute


def plain_search(logprobs_of, prompt, width, steps, ends, penalty=1.0, early=False):
    """Looks at every continuation of every beam; (score, answer) of the best, best first."""
    live, finished = [(0.0, [])], []
    for length in range(1, steps + 1):
        every = [
            (total + float(value), answer, token)
            for total, answer in live
            for token, value in enumerate(logprobs_of([*prompt, *answer]))
        ]
        every.sort(key=lambda entry: -entry[0])
        live = []
        for rank, (total, answer, token) in enumerate(every[: max(2, 1 + len(ends)) * width]):
            if token in ends or length == steps:
                if rank < width:
                    finished.append((total / length**penalty, [*answer, token]))
            elif len(live) < width:
                live.append((total, [*answer, token]))
        finished = sorted(finished, key=lambda entry: -entry[0])[:width]
        if live and len(finished) == width:
            reach = steps if early == "never" and penalty > 0 else length
            if early is True or live[0][0] / reach**penalty <= finished[-1][0]:
                break
    return finished


def likely_ends(logprobs_of, prompt, count):
    """Tokens that beams meet: the second likeliest at each step of the greedy answer."""
    tokens, found = list(prompt), []
    while len(found) < count:
        order = np.argsort(-logprobs_of(tokens))
        found += [int(order[1])] if order[1] not in found else []
        tokens.append(int(order[0]))
    return frozenset(found)


def beams(ask, name, prompt, width, **params):
    return ask(name, prompt, n=width, use_beam_search=True, temperature=1.0, **params)


def assert_idle(engine):
    engine.cache.check()
    stats = engine.cache.stats()
    assert (stats.held, stats.leases, stats.free + stats.cached) == (0, 0, stats.num_blocks)
    assert not engine.has_work()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_answers_of_a_plain_search(tiny_engine, ask, run_all, logprobs_of, prompt, width):
    engine = tiny_engine()
    ends = likely_ends(logprobs_of, prompt, 2)
    result = run_all(engine, [beams(ask, "r", prompt, width, max_tokens=9, stop_token_ids=ends)])["r"]
    expected = plain_search(logprobs_of, prompt, width, 9, ends)
    assert list(result.tokens.values()) == [answer for _, answer in expected]
    for index, (_, answer) in enumerate(expected):
        assert result.reason[index] == ("stop" if answer[-1] in ends else "length")
    assert engine.cache.stats().forks >= width - 1
    assert_idle(engine)


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 2.0])
@pytest.mark.parametrize("early", [True, False, "never"])
def test_length_penalty_and_early_stopping(tiny_engine, ask, run_all, logprobs_of, penalty, early):
    ends = likely_ends(logprobs_of, PROMPTS[0], 3)
    settings = {"length_penalty": penalty, "early_stopping": early, "stop_token_ids": ends}
    result = run_all(tiny_engine(), [beams(ask, "r", PROMPTS[0], 3, max_tokens=12, **settings)])["r"]
    expected = plain_search(logprobs_of, PROMPTS[0], 3, 12, ends, penalty, early)
    assert list(result.tokens.values()) == [answer for _, answer in expected]


@pytest.mark.parametrize("publish", [True, False])
def test_beams_of_many_requests_in_a_tiny_pool(tiny_engine, ask, run_all, logprobs_of, publish):
    """Preempted beams, parked beams that give up their blocks, and choices beside them."""
    engine = tiny_engine(num_blocks=14, max_batch_tokens=16, max_num_seqs=5)
    ends = likely_ends(logprobs_of, PROMPTS[0], 2)
    cache = {"read": publish, "publish": publish}
    requests = [
        beams(ask, str(i), prompt, width, max_tokens=14, stop_token_ids=ends, **cache)
        for i, (prompt, width) in enumerate(itertools.product(PROMPTS, (2, 4)))
    ]
    requests += [ask("plain", range(90, 110), n=3, max_tokens=20, **cache)]
    results = run_all(engine, requests)
    assert engine.scheduler.preemptions > 20
    for i, (prompt, width) in enumerate(itertools.product(PROMPTS, (2, 4))):
        expected = plain_search(logprobs_of, prompt, width, 14, ends)
        assert list(results[str(i)].tokens.values()) == [answer for _, answer in expected]
    assert {len(tokens) for tokens in results["plain"].tokens.values()} == {20}
    assert_idle(engine)


def test_more_beams_than_may_run_at_once(tiny_engine, ask, run_all, logprobs_of):
    engine = tiny_engine(max_num_seqs=2)
    result = run_all(engine, [beams(ask, "r", PROMPTS[0], 5, max_tokens=6)])["r"]
    expected = plain_search(logprobs_of, PROMPTS[0], 5, 6, frozenset())
    assert list(result.tokens.values()) == [answer for _, answer in expected]
    assert_idle(engine)


@pytest.mark.parametrize("steps", range(1, 9))
def test_an_abort_in_the_midst_of_a_search_leaves_nothing_behind(tiny_engine, ask, steps):
    engine = tiny_engine(num_blocks=12, max_batch_tokens=16, max_num_seqs=4)
    engine.add(beams(ask, "r", PROMPTS[0], 4))
    for _ in range(steps):
        engine.step()
    assert engine.abort("r")
    assert_idle(engine)


def test_the_answer_comes_at_the_end_with_the_best_of_the_beams(tiny_engine, ask, run_all, logprobs_of):
    engine = tiny_engine()
    request = ask(
        "r", PROMPTS[0], n=2, best_of=4, use_beam_search=True, temperature=1.0, max_tokens=3, logprobs=2
    )
    result = run_all(engine, [request])["r"]
    expected = plain_search(logprobs_of, PROMPTS[0], 4, 3, frozenset())[:2]
    start, *answers = result.outputs
    assert (start.tokens, start.start.prompt_tokens, start.chunks("rep")[1:]) == ((), 30, [])
    assert [list(output.tokens) for output in answers] == [answer for _, answer in expected]
    # Four beams for two steps, four answers at the third.
    assert (answers[0].usage, result.usage) == (None, Usage(30, 12, 0))
    for output, (score, _) in zip(answers, expected, strict=True):
        assert output.text == engine.tokenizer.decode(output.tokens)
        assert [entry["id"] for entry in output.logprobs] == list(output.tokens)
        assert sum(entry["logprob"] for entry in output.logprobs) / 3 == pytest.approx(score)
        tops = [[other["logprob"] for other in entry["top"]] for entry in output.logprobs]
        assert all(len(top) == 2 and top[0] >= top[1] for top in tops)


def test_a_stop_string_ends_beams_as_its_token_would(tiny_engine, ask, run_all):
    """The tokens of the tiny model are bytes: a stop string of one letter is one token."""

    def search(**stop):
        engine = tiny_engine()
        return engine, run_all(
            engine, [beams(ask, "r", PROMPTS[1], 4, max_tokens=9, length_penalty=0.0, **stop)]
        )

    engine, free = search()
    pieces = {token: engine.tokenizer.token_bytes(token) for token in free["r"].tokens[0]}
    token, letter = next((token, piece.decode()) for token, piece in pieces.items() if piece.isalnum())
    by_token, by_text = (
        search(**stop)[1]["r"] for stop in ({"stop_token_ids": frozenset({token})}, {"stop": (letter,)})
    )
    assert "stop" in by_text.reason.values()
    assert (by_text.tokens, by_text.text, by_text.reason) == (by_token.tokens, by_token.text, by_token.reason)


def test_no_beam_ends_before_min_tokens(tiny_engine, ask, run_all):
    free = run_all(tiny_engine(), [beams(ask, "r", PROMPTS[1], 3, max_tokens=8)])["r"]
    ends = frozenset(free.tokens[0])
    kept = run_all(
        tiny_engine(), [beams(ask, "r", PROMPTS[1], 3, max_tokens=8, min_tokens=4, stop_token_ids=ends)]
    )["r"]
    assert not any(set(tokens[:4]) & ends for tokens in kept.tokens.values())


def test_tokens_of_transformers(tiny_engine, ask, run_all, logprobs_of):
    transformers = pytest.importorskip("transformers")
    ours, weights = tiny_config(), RandomWeights(tiny_config())
    config = transformers.LlamaConfig(
        vocab_size=ours.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
        rms_norm_eps=ours.rms_eps, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.load_state_dict({name: weights.get(name) for name in theirs.state_dict()})
    cases = itertools.product(PROMPTS[:2], (2, 4), (0.5, 1.0), (True, False, "never"))
    for prompt, width, penalty, early in cases:
        ends = likely_ends(logprobs_of, prompt, 2)
        expected = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width, num_return_sequences=width, max_new_tokens=10, do_sample=False,
            length_penalty=penalty, early_stopping=early, eos_token_id=sorted(ends), pad_token_id=1,
        )  # fmt: skip
        request = beams(
            ask, "r", prompt, width, max_tokens=10, stop_token_ids=ends,
            length_penalty=penalty, early_stopping=early,
        )  # fmt: skip
        found = run_all(tiny_engine(), [request])["r"].tokens
        padded = [[*prompt, *found[index], *[1] * 10][: expected.shape[1]] for index in range(width)]
        assert padded == expected.tolist(), (prompt, width, penalty, early)


@pytest.fixture(scope="module")
def crowded(tiny_engine):
    """One small pool for all examples: what earlier ones left in the cache must not matter."""
    sizes = {"max_batch_tokens": 14, "max_num_seqs": 4, "draft_tokens": 2}
    return tiny_engine(num_blocks=13, **sizes), tiny_engine(num_blocks=1024)


ACTIONS = st.one_of(
    st.tuples(st.just("search"), st.integers(0, 3), st.integers(1, 5), st.integers(1, 10), st.booleans()),
    st.tuples(st.just("draw"), st.integers(0, 3), st.integers(1, 5), st.integers(1, 10), st.booleans()),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("step"), st.integers(1, 6)),
)


class Crowd:
    """Searches and draws that come, go and are aborted, and what they answered."""

    def __init__(self, engine, ask):
        self.engine, self.ask, self.requests, self.tokens, self.count = engine, ask, {}, {}, 0

    def search(self, which, width, length, cached):
        self._add(which, cached, n=width, use_beam_search=True, max_tokens=length)

    def draw(self, which, width, length, cached):
        self._add(which, cached, n=1, best_of=width, max_tokens=length, temperature=1.0, seed=which)

    def _add(self, which, cached, **params):
        name = str(self.count)
        self.count += 1
        self.requests[name] = self.ask(name, PROMPTS[which], read=cached, publish=cached, **params)
        self.engine.add(self.requests[name])

    def abort(self, which):
        if self.engine.abort(str(which)):
            del self.requests[str(which)]

    def step(self, count):
        for _ in range(count):
            for output in self.engine.step():
                self.tokens.setdefault(output.request_id, {}).setdefault(output.index, []).extend(
                    output.tokens
                )
        self.engine.cache.check()


@settings(max_examples=40, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=14))
def test_any_mix_of_searches_and_draws_in_a_small_pool(crowded, ask, run_all, actions):
    engine, roomy = crowded
    crowd = Crowd(engine, ask)
    for action, *details in actions:
        getattr(crowd, action)(*details)
    for _ in range(3000):
        if not engine.has_work():
            break
        crowd.step(1)
    assert_idle(engine)
    for name, request in crowd.requests.items():
        assert crowd.tokens[name] == run_all(roomy, [request])[name].tokens


def search(width, **params):
    params = SamplingParams(n=width, use_beam_search=True, **params)
    return BeamSearch(params, candidates_kept(params, 1), 9, lambda path: path.token == 0)


def test_ties_go_to_the_better_beam_then_to_the_lower_token():
    found = search(2).advance([[(5, -1.0), (3, -1.0), (7, -1.0)]])
    assert [(parent, path.token) for parent, path in found] == [(0, 3), (0, 5)]


def test_ends_beyond_the_width_are_no_answers_and_impossible_tokens_no_beams():
    beam = search(1)
    [(parent, path)] = beam.advance([[(4, -0.1), (0, -0.2), (9, -math.inf)]])
    assert (parent, path.tokens(), beam.finished) == (0, [4], [])
    assert beam.advance([[(0, -0.5), (9, -math.inf)]]) == []
    assert [(score, path.tokens()) for score, path in beam.finished] == [(-0.3, [4, 0])]


def test_beams_that_cannot_be_are_refused(tiny_engine, ask):
    with pytest.raises(InvalidRequest, match="penalties"):
        SamplingParams(use_beam_search=True, presence_penalty=0.5)
    engine = tiny_engine()
    engine.limits = replace(engine.limits, vocab_size=9)
    with pytest.raises(InvalidRequest, match="4 beams"):
        engine.add(beams(ask, "r", [1, 2], 5))
