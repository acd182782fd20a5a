"""`warmroute replay` and the openai-style headers against the real endpoint."""

import json

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow]

KEYS = {
    "requests",
    "errors",
    "prompt_tokens",
    "cached_tokens",
    "hit_rate",
    "ideal_hit_rate",
    "ttft_ms",
    "tpot_ms",
    "e2e_ms",
    "requests_per_replica",
    "duration_s",
    "policy",
}


def test_replay_of_the_tiny_workload_hits_nearly_as_often_as_one_cache(endpoint, warmroute, tmp_path) -> None:
    report = tmp_path / "report.json"
    ended = warmroute(
        *("replay", "builtin:tiny", "--url", endpoint.url, "--api-key", endpoint.key),
        *("--concurrency", "1", "--policy", "cache_aware", "--json", str(report)),
    )
    assert ended.returncode == 0, ended.stderr
    assert "cache_aware" in ended.stdout
    found = json.loads(report.read_text())
    assert set(found) == KEYS
    assert (found["requests"], found["errors"], found["policy"]) == (10, {}, "cache_aware")
    assert sum(found["requests_per_replica"].values()) == 10
    assert set(found["requests_per_replica"]) <= endpoint.replicas()
    assert 0.35 < found["ideal_hit_rate"] < 0.45
    # One at a time: beside a busy holder, a copy on an idle replica with free blocks would be as good. Even
    # so the policy may trade a hit for a replica that it has measured to be faster.
    assert found["hit_rate"] >= 0.75 * found["ideal_hit_rate"]
    assert found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"]


def test_replay_says_what_is_wrong_with_the_endpoint(endpoint, warmroute) -> None:
    refused = warmroute("replay", "builtin:tiny", "--url", endpoint.url, "--api-key", "wrong")
    assert refused.returncode == 1
    assert "401" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_one_request_id_comes_back(endpoint) -> None:
    with endpoint.client() as http:
        answer = http.get("/health", headers={"x-request-id": "mine-1"})
    assert answer.headers.get_list("x-request-id") == ["mine-1"]
