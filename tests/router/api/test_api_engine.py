"""The API over real engines in this process: hits, token counts and logprobs as the engine has them."""

import asyncio
import hashlib
import json
import random
from collections import Counter

import httpx
import pytest

from kvcore.fingerprint import FingerprintUpdate
from kvcore.hashing import PrefixHasher
from replica.config import EngineConfig
from replica.models import load_tokenizer
from replica.request import Request, tokens_from_wire
from replica.worker import build_worker
from router.administration import Administration
from router.api.config import ApiConfig
from router.api.server import build_api
from router.dispatch import Dispatcher, ModelInfo
from router.placement import Placement

SECRET = b"one secret for all"
ROOT = {"authorization": "Bearer root"}
CLEAR, EXPLAIN = "/admin/cache/clear", "/admin/cache/explain"
LONG = "The quick brown fox jumps over the lazy dog. " * 5


class Engines:
    """Two engines, and a transport to them without a network between."""

    def __init__(self):
        options = {"model": "random:tiny", "num_blocks": 128, "threads": 1, "hash_secret": SECRET}
        self.workers = {name: build_worker(EngineConfig(**options, replica_id=name)) for name in ("a", "b")}
        self.placement = Placement(rng=random.Random(0))
        self.info = None
        dispatcher = Dispatcher(self.placement, PrefixHasher(SECRET), self, lambda: self.info)
        admin = Administration(self, lambda: self.workers)
        config = ApiConfig(model_names=("tiny",), admin_key=hashlib.sha256(b"root").hexdigest())
        self.app = build_api(config, load_tokenizer("random:tiny"), dispatcher, admin)

    async def generate(self, replica_id, request):
        async for chunk in self.workers[replica_id].generate(Request.from_wire(request)):
            yield chunk

    async def clear_cache(self, replica_id, request, timeout_s):
        return await asyncio.to_thread(self.workers[replica_id].clear_cache, request["namespace"])

    async def explain(self, replica_id, request, timeout_s):
        tokens = tokens_from_wire(request["tokens"])
        return await asyncio.to_thread(self.workers[replica_id].explain, tokens, request["namespace"])

    async def poll(self):
        """Tell the router everything anew."""
        for name, worker in self.workers.items():
            answer = await worker.poll(None, 0, 0.0)
            self.info = ModelInfo(**answer["model"])
            self.placement.block_size = self.info.block_size
            self.placement.join(name)
            load = {**answer["load"], "prefill_tokens_per_s": 50_000.0}  # neither is the faster one by chance
            assert self.placement.update(name, FingerprintUpdate.decode(answer["update"]), load)

    async def loads(self):
        return [(await worker.poll(None, 0, 0.0))["load"] for worker in self.workers.values()]


@pytest.fixture(scope="module")
def engines():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARMROUTE_KERNELS", "reference")
        found = Engines()
    for worker in found.workers.values():
        worker.start()
    yield found
    for worker in found.workers.values():
        worker.stop()


@pytest.fixture
async def client(engines):
    await engines.poll()
    transport = httpx.ASGITransport(app=engines.app, client=("127.0.0.1", 4000))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as found:
        yield found


async def test_the_second_time_is_a_hit_as_predicted(engines, client):
    body = {"model": "tiny", "prompt": LONG, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    first = await client.post("/v1/completions", json=body)
    await engines.poll()
    second = await client.post("/v1/completions", json=body)
    salted = await client.post("/v1/completions", json={**body, "cache_salt": "mine"})
    bypass = await client.post("/v1/completions", json={**body, "no_cache": True})
    usages = [r.json()["usage"] for r in (first, second, salted, bypass)]
    assert [u["prompt_tokens"] for u in usages] == [225] * 4
    assert [u["prompt_tokens_details"]["cached_tokens"] for u in usages] == [0, 224, 0, 0]
    assert [u["completion_tokens"] for u in usages] == [4] * 4
    assert (
        second.headers["x-warmroute-predicted-tokens"] == second.headers["x-warmroute-cached-tokens"] == "224"
    )
    assert second.headers["x-warmroute-replica"] == first.headers["x-warmroute-replica"]
    texts = {r.json()["choices"][0]["text"] for r in (first, second, salted, bypass)}
    assert len(texts) == 1


async def test_logprobs_of_both_endpoints_agree(client):
    options = {"model": "tiny", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    tokens = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()[
        "tokens"
    ]
    chat = {**options, "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    found = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["logprobs"]["content"]
    text = (await client.post("/v1/completions", json={**options, "prompt": tokens, "logprobs": 2})).json()
    old = text["choices"][0]["logprobs"]
    assert [entry["token"] for entry in found] == old["tokens"]
    assert [entry["logprob"] for entry in found] == pytest.approx(old["token_logprobs"], abs=1e-5)
    assert [len(entry["top_logprobs"]) for entry in found] == [2, 2, 2]
    assert all(
        entry["top_logprobs"][0]["token"] == entry["token"] for entry in found
    )  # greedy takes the first
    assert old["text_offset"] == [0, len(old["tokens"][0]), len(old["tokens"][0] + old["tokens"][1])]


async def test_streamed_and_whole_answers_agree(client):
    body = {
        "model": "tiny",
        "prompt": ["one", "two"],
        "n": 2,
        "seed": 3,
        "max_tokens": 12,
        "ignore_eos": True,
    }
    whole = (await client.post("/v1/completions", json=body)).json()
    stream = await client.post("/v1/completions", json={**body, "stream": True})
    texts = dict.fromkeys(range(4), "")
    for line in stream.text.split("\n\n")[:-2]:
        choice = json.loads(line[6:])["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert [choice["text"] for choice in whole["choices"]] == list(texts.values())
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 4


async def test_a_client_that_leaves_frees_the_engines_blocks(engines, client, make_call):
    body = {"model": "tiny", "prompt": LONG, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    call = make_call(engines.app, "/v1/completions", json.dumps(body).encode())
    await call.until(lambda: call.body)
    call.leave()
    await asyncio.wait_for(call.task, 1)
    for _ in range(200):
        loads = await engines.loads()
        if not any(load["held"] for load in loads):
            break
        await asyncio.sleep(0.005)
    assert [(load["held"], load["running"], load["waiting"]) for load in loads] == [(0, 0, 0)] * 2
    assert all(load["free"] + load["cached"] == load["num_blocks"] for load in loads)
    assert {name: set(stats.values()) for name, stats in engines.placement.stats().items()} == {
        "a": {0},
        "b": {0},
    }


async def test_the_context_is_what_fits_into_an_engines_pool(client):
    body = {"model": "tiny", "prompt": LONG, "max_tokens": 2048 - 224}
    response = await client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 2048 tokens" in response.json()["error"]["message"]


GREEDY = {"model": "tiny", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


async def test_the_best_of_more_choices(client):
    body = {"model": "tiny", "prompt": LONG, "max_tokens": 6, "seed": 3, "ignore_eos": True, "logprobs": 0}
    drawn = (await client.post("/v1/completions", json={**body, "n": 5})).json()["choices"]
    best = (await client.post("/v1/completions", json={**body, "n": 2, "best_of": 5})).json()
    ranked = sorted(drawn, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == 5 * 6


async def test_beams_are_likelier_than_the_greedy_answer(client):
    body = {**GREEDY, "prompt": LONG, "logprobs": 0}
    greedy = (await client.post("/v1/completions", json=body)).json()["choices"]
    beams = {**body, "use_beam_search": True, "n": 3, "best_of": 4, "length_penalty": 0}
    found = (await client.post("/v1/completions", json=beams)).json()["choices"]
    totals = [sum(choice["logprobs"]["token_logprobs"]) for choice in [*found, *greedy]]
    assert len(found) == 3 and totals[:3] == sorted(totals[:3], reverse=True)
    assert totals[0] >= totals[3] - 1e-4  # but for rounding
    messages = [{"role": "user", "content": "hi"}]
    chat = {**GREEDY, "messages": messages, "use_beam_search": True, "best_of": 2, "early_stopping": True}
    answer = (await client.post("/v1/chat/completions", json=chat)).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"]


async def explain(client, prompt, replica_id, **more):
    query = {"prompt": prompt, "replica": replica_id, **more}
    answer = (await client.get(EXPLAIN, params=query, headers=ROOT)).json()
    [found] = answer["replicas"]
    assert (found.pop("replica"), found.pop("num_tokens")) == (replica_id, answer["num_tokens"])
    return found


async def test_clearing_is_told_by_the_ordinary_events(engines, client):
    body = {**GREEDY, "prompt": LONG, "max_tokens": 1}
    await client.post(CLEAR, json={"all": True}, headers=ROOT)
    homes = [
        (await client.post("/v1/completions", json={**body, "cache_salt": salt})).headers[
            "x-warmroute-replica"
        ]
        for salt in ("mine", "yours")
    ]
    kept = {"hit_tokens": 224, "reason": "complete", "evicted_s_ago": None}
    assert await explain(client, LONG, homes[0], salt="mine") == kept
    answer = await client.post(CLEAR, json={"namespace": {"salt": "mine"}}, headers=ROOT)
    cleared = {entry["replica"]: (entry["cleared"], entry["held"]) for entry in answer.json()["replicas"]}
    assert cleared == {name: (14, 0) if name == homes[0] else (0, 0) for name in "ab"}
    assert (await explain(client, LONG, homes[0], salt="mine"))["hit_tokens"] == 0
    assert await explain(client, LONG, homes[1], salt="yours") == kept
    await engines.poll()
    for salt, tokens in (("mine", "0"), ("yours", "224")):
        response = await client.post("/v1/completions", json={**body, "cache_salt": salt})
        assert response.headers["x-warmroute-predicted-tokens"] == tokens
        assert response.headers["x-warmroute-cached-tokens"] == tokens


async def test_what_has_priority_outlives_the_rest(engines, client):
    body = {**GREEDY, "max_tokens": 1}
    await client.post(CLEAR, json={"all": True}, headers=ROOT)
    prompts = {name: f"{name} is what this is about. " * 8 for name in ("High", "Range", "None")}
    fields = {
        "High": {"cache_priority": 100},
        "Range": {"cache_retention": [{"start": 0, "end": 32, "priority": 100, "duration_s": 3600}]},
        "None": {},
    }
    homes = {}
    for name, prompt in prompts.items():
        response = await client.post("/v1/completions", json={**body, "prompt": prompt, **fields[name]})
        homes[name] = response.headers["x-warmroute-replica"]
    flooded = Counter()
    while min(flooded["a"], flooded["b"]) < 3:  # 3,000 tokens through each cache of 2,048
        number = flooded.total()
        assert number < 40
        await engines.poll()
        flood = {**body, "prompt": [(number * 31 + k * 7) % 250 + 3 for k in range(1000)]}
        answer = await client.post("/v1/completions", json=flood)
        assert answer.status_code == 200
        flooded[answer.headers["x-warmroute-replica"]] += 1
    found = {name: await explain(client, prompts[name], homes[name]) for name in prompts}
    assert found["High"]["reason"] == "complete"
    assert (found["Range"]["hit_tokens"], found["None"]["hit_tokens"]) == (32, 0)
