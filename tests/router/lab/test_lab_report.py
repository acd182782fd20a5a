import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from router.lab.client import Outcome
from router.lab.report import JSON_KEYS, Report, Summary, report_table, summarize, write_json

EXACT_KEYS = [
    "requests", "errors", "prompt_tokens", "cached_tokens", "hit_rate", "ideal_hit_rate",
    "ttft_ms", "tpot_ms", "e2e_ms", "requests_per_replica", "duration_s", "policy",
]  # fmt: skip


def outcome(start, first, last, end, **more):
    values = {"prompt_tokens": 100, "completion_tokens": 5, "cached_tokens": 40, "replica": "a"} | more
    return Outcome(start_s=start, first_s=first, last_s=last, end_s=end, finished=True, **values)


def test_percentiles_are_exact():
    assert Summary.of([4.0, 1.0, 3.0, 2.0]) == Summary(2.5, 2.5, pytest.approx(3.7), pytest.approx(3.97))
    assert Summary.of([float(n) for n in range(101)]) == Summary(50, 50, 90, 99)
    assert Summary.of([7.0]) == Summary(7, 7, 7, 7)
    assert Summary.of([]) == Summary(None, None, None, None)


def test_figures():
    outcomes = [
        outcome(10.0, 10.5, 12.5, 12.75),
        outcome(11.0, 12.0, 13.0, 13.0, replica="b", cached_tokens=None),
        Outcome(start_s=9.0, end_s=9.5, error="http_500", detail="no"),
    ]
    report = summarize(outcomes, 0.75, over_context=2, policy="p")
    assert report == Report(
        requests=5,
        errors={"http_500": 1, "over_context": 2},
        prompt_tokens=200,
        cached_tokens=40,
        hit_rate=0.2,
        ideal_hit_rate=0.75,
        ttft_ms=Summary.of([500.0, 1000.0]),
        tpot_ms=Summary.of([500.0, 250.0]),
        e2e_ms=Summary.of([2750.0, 2000.0]),
        requests_per_replica={"a": 1, "b": 1},
        duration_s=4.0,
        policy="p",
        notes=("http_500: no",),
    )
    assert not report.failed_entirely


def test_one_token_has_no_time_per_token():
    assert summarize([outcome(0, 1, 1, 1, completion_tokens=1)], None).tpot_ms == Summary()


def test_chunks_stand_in_for_tokens_that_usage_does_not_count():
    report = summarize([outcome(0, 1, 2, 2, completion_tokens=None, pieces=3)], None)
    assert report.tpot_ms.mean == 500.0


def test_unreported_cache_is_unknown_not_zero():
    report = summarize([outcome(0, 1, 2, 2, cached_tokens=None)], None)
    assert (report.cached_tokens, report.hit_rate) == (None, None)
    assert summarize([outcome(0, 1, 2, 2, cached_tokens=0)], None).hit_rate == 0.0


def test_json_has_exactly_these_keys_and_never_nan():
    failed = summarize([Outcome(start_s=1.0, end_s=2.0, error="timeout")], None)
    data = json.loads(write_json(failed.as_json()))
    assert list(data) == EXACT_KEYS == list(JSON_KEYS)
    nothing = {"mean": None, "p50": None, "p90": None, "p99": None}
    assert data["ttft_ms"] == data["tpot_ms"] == data["e2e_ms"] == nothing
    assert (data["hit_rate"], data["ideal_hit_rate"], data["policy"]) == (None, None, None)
    assert data["errors"] == {"timeout": 1}
    assert failed.failed_entirely
    with pytest.raises(ValueError):
        write_json(float("nan"))


def as_text(reports):
    out = io.StringIO()
    Console(file=out, width=80).print(report_table(reports))
    return out.getvalue()


def test_table_fits_eighty_columns():
    counts = {"replica-a": 70, "replica-b": 62}
    big = outcome(0, 12.345, 20, 20, completion_tokens=9)
    report = replace(summarize([big], 0.8901, policy="cache_aware"), requests_per_replica=counts)
    lines = as_text([report, replace(report, policy="round_robin", hit_rate=0.5)]).splitlines()
    rows = [line.split() for line in lines if "%" in line]
    assert rows == [
        ["cache_aware", "40.0", "%", "89.0", "%", "12,345", "12,345", "12,345", "957", "70", "/", "62"],
        ["round_robin", "50.0", "%", "89.0", "%", "12,345", "12,345", "12,345", "957", "70", "/", "62"],
    ]


def test_table_explains_a_hit_rate_above_the_ideal():
    report = summarize([outcome(0, 1, 2, 2)], 0.39)
    assert report.hit_rate == 0.4
    assert "A hit rate above the ideal: " in as_text([report, replace(report, ideal_hit_rate=0.5)])
    for explained in (0.4, 0.39999, None):
        assert "above the ideal" not in as_text([replace(report, ideal_hit_rate=explained)])


def test_table_shows_failures_and_what_is_unknown():
    reports = [
        summarize([outcome(0, 0.05, 0.25, 1, replica=None)], 0.5),
        summarize([Outcome(start_s=0.0, end_s=1.0, error="timeout")], None, policy="p"),
    ]
    rows = [line.split() for line in as_text(reports).splitlines()[-3:]]
    assert rows[:2] == [
        ["-", "40.0", "%", "50.0", "%", "50.0", "50.0", "50.0", "50.0", "1", "0"],
        ["p", "-", "-", "-", "-", "-", "-", "1", "1"],
    ]
