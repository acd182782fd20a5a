"""Requests from the wire, their limits, and outputs back onto it."""

import math

import numpy as np
import pytest

from replica.errors import InvalidRequest
from replica.request import Failure, Output, Request, SamplingParams, Start, Usage


def wire(**changes):
    tokens, hashes = np.array([5, 6, 7], dtype="<i4"), np.array([2**64 - 1], dtype="<u8")
    return {
        "v": 1,
        "id": "r1",
        "target": "replica-1",
        "tokens": tokens.tobytes(),
        "hashes": hashes.tobytes(),
        "namespace": {"tenant": "t", "salt": 0, "adapter": None},
        "sampling": {
            "n": 2,
            "max_tokens": 5,
            "temperature": 0.5,
            "seed": None,
            "stop": ["x"],
            "stop_token_ids": [3],
        },
        "cache": {"read": False, "publish": True},
        **changes,
    }


def test_a_wire_request_arrives_whole():
    request = Request.from_wire(wire())
    assert (request.id, request.tokens.tolist(), request.tokens.dtype) == ("r1", [5, 6, 7], np.int32)
    assert (request.hashes.tolist(), request.hashes.dtype) == ([2**64 - 1], np.uint64)
    assert (request.tenant, request.salt, request.adapter) == ("t", 0, None)
    assert (request.read, request.publish) == (False, True)
    expected = SamplingParams(n=2, max_tokens=5, temperature=0.5, stop=("x",), stop_token_ids=frozenset({3}))
    assert request.sampling == expected


def test_what_is_missing_takes_its_default():
    request = Request.from_wire({"v": 1, "id": "a", "tokens": b"\x01\0\0\0"})
    assert request.sampling == SamplingParams()
    assert (request.tenant, request.salt, request.hashes, request.read, request.publish) == (
        None,
        None,
        None,
        True,
        True,
    )


def test_a_salt_never_shows_in_a_log():
    assert "hush" not in repr(Request.from_wire(wire(namespace={"salt": "hush"})))


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2},
        {"v": None},
        {"tokens": b"\x01\0\0"},
        {"tokens": None},
        {"hashes": b"abc"},
        {"namespace": "t"},
        {"sampling": {"max_tokens": "many"}},
        {"sampling": {"temprature": 1.0}},
        {"sampling": {"stop": [3]}},
        {"sampling": {"stop": [""]}},
        {"sampling": {"stop_token_ids": ["x"]}},
    ],
)
def test_malformed_requests_are_refused(changes):
    with pytest.raises(InvalidRequest):
        Request.from_wire(wire(**changes))


def test_a_request_without_an_id_or_tokens_is_refused():
    for missing in ("id", "tokens"):
        with pytest.raises(InvalidRequest):
            Request.from_wire({name: value for name, value in wire().items() if name != missing})


@pytest.mark.parametrize(
    "params",
    [
        {"n": 0},
        {"n": 129},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"top_k": -2},
        {"min_p": 1.1},
        {"presence_penalty": 2.1},
        {"frequency_penalty": math.nan},
        {"repetition_penalty": 0.0},
        {"logprobs": -1},
        {"min_tokens": -1},
        {"min_tokens": 17},
        {"best_of": 0},
        {"best_of": 129},
        {"best_of": 1.5},
        {"use_beam_search": 1},
        {"length_penalty": 10.1},
        {"length_penalty": math.nan},
        {"early_stopping": "always"},
        {"early_stopping": 1},
    ],
)
def test_sampling_values_out_of_range_are_refused_by_name(params):
    with pytest.raises(InvalidRequest, match=next(iter(params))):
        SamplingParams(**params)


def test_choices_and_beams_come_from_the_wire():
    sampling = {
        "n": 2,
        "best_of": 4,
        "use_beam_search": True,
        "length_penalty": 0.5,
        "early_stopping": "never",
    }
    params = Request.from_wire(wire(sampling=sampling)).sampling
    assert (params.width, params.ranked) == (4, False)
    assert vars(params).items() >= sampling.items()
    assert SamplingParams.from_wire({"n": 2, "best_of": 4}).ranked
    assert not SamplingParams.from_wire({"n": 2, "best_of": 2}).ranked
    assert SamplingParams.from_wire({"n": 2, "best_of": None}).width == 2


def test_an_output_without_tokens_is_the_start_alone():
    output = Output("r", start=Start(3, 2, 9, 4))
    assert [chunk["type"] for chunk in output.chunks("rep")] == ["start"]


def test_an_output_becomes_start_delta_and_end_chunks():
    output = Output(
        "r", 1, "hi", (7,), None, "stop", Start(3, 2, 9, 4), Usage(3, 1, 2)
    )  # fmt: skip
    assert output.chunks("rep") == [
        {"type": "start", "replica": "rep", "prompt_tokens": 3, "cached_tokens": 2, "epoch": 9, "seq": 4},
        {"type": "delta", "index": 1, "text": "hi", "tokens": [7], "logprobs": None, "finish_reason": "stop"},
        {"type": "end", "prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 2},
    ]
    assert output.last


def test_a_failure_is_one_error_chunk():
    output = Output("r", failure=Failure("internal", "boom"))
    assert output.chunks("rep") == [{"type": "error", "code": "internal", "message": "boom"}]
    assert output.last
