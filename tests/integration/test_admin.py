"""The administration over the real endpoint: what it clears is gone everywhere, what it explains is true."""

import random

import pytest

MODEL = "smollm2-135m"
ROOT = {"authorization": "Bearer key-of-the-operator"}
CLEAR, EXPLAIN = "/admin/cache/clear", "/admin/cache/explain"
pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow]


def complete(http, prompt: "str | list[int]", **more) -> tuple[str, int]:
    """The replica that answered, and the prompt tokens it found in its cache."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, **more}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return (
        answer.headers["x-warmroute-replica"],
        answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


def explained(http, tokens: list[int], replica: str, **more) -> dict:
    query = {"tokens": ",".join(map(str, tokens)), "tenant": "tenant-a", "replica": replica, **more}
    answer = http.get(EXPLAIN, params=query, headers=ROOT)
    assert answer.status_code == 200, answer.text
    return answer.json()["replicas"][0]


def test_a_namespace_is_cleared_at_every_replica(endpoint) -> None:
    prompt = random.sample(range(1000, 40_000), 6 * 16 + 1)  # six full blocks, and the token to compute
    with endpoint.client() as http:
        assert http.post(CLEAR, json={"all": True}).status_code == 401  # a tenant's key
        home, _ = complete(http, prompt)
        salted, _ = complete(http, prompt, cache_salt="pepper")
        kept = explained(http, prompt, home)
        assert (kept["reason"], kept["hit_tokens"], kept["num_tokens"]) == ("complete", 96, 97)
        answer = http.post(CLEAR, json={"namespace": {"tenant": "tenant-a", "salt": "pepper"}}, headers=ROOT)
        assert answer.status_code == 200, answer.text
        assert {entry["replica"] for entry in answer.json()["replicas"]} == endpoint.replicas()
        assert sum(entry["cleared"] for entry in answer.json()["replicas"]) >= 6
        assert explained(http, prompt, salted, salt="pepper")["hit_tokens"] == 0
        assert explained(http, prompt, home) == kept
        assert complete(http, prompt, cache_salt="pepper")[1] == 0
        http.post(CLEAR, json={"all": True}, headers=ROOT)
        assert complete(http, prompt)[1] == 0


@pytest.mark.parametrize("fields", [{"n": 2, "best_of": 3}, {"use_beam_search": True, "n": 2}])
def test_choices_that_share_a_prompt(endpoint, fields: dict) -> None:
    with endpoint.client() as http:
        body = {"model": MODEL, "prompt": "The sea is", "max_tokens": 4, "ignore_eos": True, **fields}
        answer = http.post("/v1/completions", json=body).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    assert answer["usage"]["completion_tokens"] >= 8
