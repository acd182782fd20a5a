"""The comparison of simulation and live run, as far as it needs no live run."""

import asyncio
import importlib.util
import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from router.lab.client import Target
from router.lab.record import Request
from router.lab.sim.timing import Timing

SOURCE = Path(__file__).parents[2] / "benchmarks" / "simulate_vs_live.py"
TIMING = Timing(0.02, 0.0, 0.001, 0.0, 0.0, max_batch_tokens=512, max_num_seqs=64)


@pytest.fixture(scope="module")
def side_by_side():
    spec = importlib.util.spec_from_file_location("simulate_vs_live", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_requests_are_simulated_on_the_demos_fleet_at_the_given_speed(side_by_side):
    tokens = np.arange(100, dtype=np.int32)
    requests = [Request(token_ids=tokens, max_tokens=3, timestamp_s=at) for at in (0.0, 4.0)]
    figures = side_by_side.simulate(requests, TIMING, "cache_aware", speed=2)
    # The second one hits all but the last token: any part of a block counts, but the end was never full.
    assert figures["hit_rate"] == 96 / 200
    assert figures["ttft_mean_ms"] == pytest.approx((120 + 24) / 2)
    assert figures["e2e_mean_ms"] == pytest.approx((120 + 24) / 2 + 2 * 21)
    round_robin = side_by_side.simulate(requests, TIMING, "round_robin", speed=2)
    assert round_robin["hit_rate"] == 0, "two replicas"


def test_prompts_are_simulated_as_the_endpoint_tokenizes_them(side_by_side, monkeypatch):
    def answer(request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        body = json.loads(request.content)
        assert (body["model"], body["add_generation_prompt"]) == ("m", True)
        return httpx.Response(200, json={"tokens": [7, len(body["messages"])]})

    class Wired(side_by_side.Client):
        def __init__(self, target, timeout_s):
            super().__init__(target, timeout_s)
            self._http = httpx.AsyncClient(transport=httpx.MockTransport(answer))

    monkeypatch.setattr(side_by_side, "Client", Wired)
    chat = Request(
        messages=({"role": "user", "content": "a"},) * 3, max_tokens=5, timestamp_s=2.0, session_id="s"
    )
    [simulated] = asyncio.run(side_by_side.tokenized([chat], Target("http://there")))
    assert (simulated.token_ids.tolist(), simulated.messages) == ([7, 3], None)
    assert (simulated.max_tokens, simulated.timestamp_s, simulated.session_id) == (5, 2.0, "s")


def run(hit_rate, ttft):
    return {"hit_rate": hit_rate, "ttft_mean_ms": ttft, "ttft_p50_ms": 1.0, "e2e_mean_ms": 1.0, "others": 0}


def test_policies_are_compared_only_where_the_live_rounds_tell_them_apart(side_by_side):
    runs = {
        "a": [run(0.70, 300), run(0.72, 320)],
        "b": [run(0.71, 200), run(0.73, 220)],
        "c": [run(0.90, 100), run(0.91, 90)],
    }
    simulated = {"a": run(0.75, 250), "b": run(0.71, 260), "c": run(0.90, 95)}
    rows = [side_by_side.row(name, side_by_side.medians(runs[name]), simulated[name]) for name in runs]
    assert [round(row["difference_points"], 6) for row in rows] == [4, -1, -0.5]
    verdicts = side_by_side.verdicts(rows, runs)
    assert not verdicts["hit_rates_within_1_point"]
    assert verdicts["order_by_hit_rate"] == {
        "right": [["a", "c"], ["b", "c"]],
        "wrong": [],
        "undecided": [["a", "b"]],
    }
    assert verdicts["order_by_mean_ttft"] == {
        "right": [["c", "b"], ["c", "a"]],
        "wrong": [["b", "a"]],
        "undecided": [],
    }


def test_what_others_took_is_what_was_busy_and_not_ours(side_by_side):
    assert side_by_side.taken_by_others((0.0, 10.0, 2.0), (4.0, 15.0, 6.0)) == 0.25
    assert side_by_side.taken_by_others((0.0, 10.0, 2.0), (4.0, 14.0, 6.5)) == 0.0
    wall_s, busy_s, ours_s = side_by_side.processor_s()
    assert wall_s > 0 and busy_s >= ours_s > 0
