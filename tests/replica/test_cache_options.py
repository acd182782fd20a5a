"""What a request may ask of the cache beyond reading and publishing."""

import numpy as np
import pytest

from kvcore.retention import Retention
from replica.errors import InvalidRequest
from replica.request import Request

MALFORMED = [
    ({"priority": 5, "retention": []}, "exclude"),
    ({"priority": 101}, "0..100"),
    ({"priority": -1}, "0..100"),
    ({"priority": True}, "integer"),
    ({"priority": "5"}, "integer"),
    ({"priority": 5.0}, "integer"),
    ({"retention": {"priority": 5}}, "list"),
    ({"retention": "x"}, "list"),
    ({"retention": [5]}, "fields"),
    ({"retention": [{"start": 0, "level": 5}]}, "fields"),
    ({"retention": [{"start": 0}]}, "priority"),
    ({"retention": [{"start": 0.5, "priority": 5}]}, "start"),
    ({"retention": [{"start": 0, "end": "9", "priority": 5}]}, "end"),
    ({"retention": [{"start": 9, "end": 9, "priority": 5}]}, "empty"),
    ({"retention": [{"start": -1, "end": 9, "priority": 5}]}, "negative"),
    ({"retention": [{"start": 0, "priority": 5, "duration_s": 0}]}, "positive"),
    ({"retention": [{"start": 0, "priority": 5, "duration_s": float("nan")}]}, "positive"),
    ({"retention": [{"start": 0, "priority": 5, "duration_s": "1"}]}, "duration_s"),
    ({"retention": [{"start": 0, "priority": 5}, {"start": 9, "priority": 6}]}, "overlap"),
]


def read(**cache):
    return Request.from_wire({"v": 1, "id": "r", "tokens": b"\x01\0\0\0", "cache": cache}).retention


def test_no_word_of_it_is_the_default():
    assert read() == read(read=True, publish=True) == read(priority=None, retention=None) == ()
    assert read(retention=[]) == ()


def test_one_priority_is_for_all_tokens():
    assert read(priority=0) == (Retention(0, None, 0),)
    assert read(priority=100) == (Retention(0, None, 100),)


def test_ranges_have_their_own_priorities_and_durations():
    ranges = [
        {"start": 32, "end": None, "priority": 10, "duration_s": None},
        {"start": 0, "end": 32, "priority": 90, "duration_s": 60},
    ]
    assert read(retention=ranges) == (Retention(0, 32, 90, 60), Retention(32, None, 10))


@pytest.mark.parametrize(("cache", "message"), MALFORMED)
def test_what_cannot_be_meant_is_refused(cache, message):
    with pytest.raises(InvalidRequest, match=message):
        read(**cache)


def test_overlapping_ranges_are_refused_however_the_request_is_made(ask):
    with pytest.raises(InvalidRequest, match="overlap"):
        Request("r", np.array([1], dtype=np.int32), retention=(Retention(0, None, 1), Retention(5, None, 2)))


def test_what_a_request_wants_kept_outlives_what_it_does_not(tiny_engine, run_all, ask):
    def kept(*ranges):
        engine = tiny_engine(num_blocks=32)
        request = ask("kept", range(10, 51), max_tokens=1)
        object.__setattr__(request, "retention", ranges)
        run_all(engine, [request])
        for i in range(4):
            run_all(engine, [ask(str(i), range(60 + 40 * i, 100 + 40 * i), max_tokens=1)])
        return run_all(engine, [ask("again", range(10, 51), max_tokens=1)])["again"].usage.cached_tokens

    assert kept() == 0
    assert kept(Retention(0, None, 90)) == 40
    assert kept(Retention(0, 20, 90), Retention(20, None, 0)) == 20
