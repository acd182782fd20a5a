"""Models, health, metrics, tokenizing, and defaults."""

import asyncio

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def test_health_follows_the_fleet(fleet):
    async with fleet.client() as client:
        ready = await client.get("/health")
        fleet.placement.leave("r0")
        fleet.placement.leave("r1")
        empty = await client.get("/health")
        fleet.placement.join("r2")
        fleet.info = None
        unknown = await client.get("/health")
    assert (ready.status_code, ready.json()) == (200, {"status": "ok", "replicas": 2})
    assert (empty.status_code, empty.json()["replicas"], empty.json()["error"]["code"]) == (
        503,
        0,
        "no_replica",
    )
    assert unknown.status_code == 503


async def test_model_cards(fleet):
    fleet.info = None
    async with fleet.client() as client:
        cards = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/alias/of-tiny")).json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == ["tiny", "alias/of-tiny"]
    assert one == cards["data"][1]
    assert {k: v for k, v in one.items() if k != "created"} == {
        "id": "alias/of-tiny",
        "object": "model",
        "owned_by": "warmroute",
        "max_model_len": 4096,
    }


async def test_tokenize_and_back(fleet):
    async with fleet.client() as client:
        answer = (await client.post("/tokenize", json={"model": "tiny", "prompt": "Grüße 🎉"})).json()
        text = await client.post("/detokenize", json={"model": "tiny", "tokens": answer["tokens"]})
    assert (answer["count"], answer["max_model_len"]) == (len("Grüße 🎉".encode()), 4096)
    assert answer["tokens"] == fleet.codec.encode_text("Grüße 🎉").tolist()
    assert text.json() == {"prompt": "Grüße 🎉"}


async def test_tokenize_sees_what_chat_sends(fleet, chat_body, tokens_of):
    async with fleet.client() as client:
        answer = (await client.post("/tokenize", json=chat_body)).json()
        await client.post(CHAT, json=chat_body)
        bare = (await client.post("/tokenize", json={**chat_body, "add_generation_prompt": False})).json()
    assert answer["tokens"] == tokens_of(fleet.transport.sent[0][1]["tokens"])
    assert answer["tokens"][: bare["count"]] == bare["tokens"] and bare["count"] < answer["count"]


async def test_detokenize_keeps_special_tokens(fleet):
    async with fleet.client() as client:
        assert (await client.post("/detokenize", json={"tokens": [1, 107]})).json() == {
            "prompt": "<|im_start|>h"
        }
        assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_long_texts_are_tokenized_in_a_thread_and_alike(make_fleet, tokens_of):
    fleet = make_fleet(inline_bytes=10)
    async with fleet.client() as client:
        await client.post(TEXT, json={"model": "tiny", "prompt": "ab" * 500})
    assert tokens_of(fleet.transport.sent[0][1]["tokens"]) == fleet.codec.encode_text("ab" * 500).tolist()


async def test_long_texts_queue_up_to_a_bound(make_fleet):
    fleet = make_fleet(inline_bytes=10, max_pending_bodies=4)
    async with fleet.client() as client:
        body = {"model": "tiny", "prompt": "ab" * 500}
        answers = await asyncio.gather(*(client.post(TEXT, json=body) for _ in range(12)))
        assert (await client.post(TEXT, json=body)).status_code == 200
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200, 429} and codes.count(200) >= 4


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (TEXT, {"prompt": "hi"}, 4094),
        (TEXT, {"prompt": "hi", "max_tokens": 4094}, 4094),
        (TEXT, {"prompt": "hi", "max_tokens": None}, 4094),
        (TEXT, {"prompt": [5] * 4095}, 1),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}, 9),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "max_completion_tokens": 3},
            3,
        ),
    ],
)
async def test_how_many_tokens_an_answer_may_have(fleet, path, body, expected):
    async with fleet.client() as client:
        assert (await client.post(path, json={"model": "tiny", **body})).status_code == 200
    assert fleet.transport.sent[0][1]["sampling"]["max_tokens"] == expected


async def test_the_default_answer_length_can_be_set(make_fleet):
    fleet = make_fleet(default_max_tokens=16)
    async with fleet.client() as client:
        await client.post(TEXT, json={"model": "tiny", "prompt": "hi"})
        await client.post(TEXT, json={"model": "tiny", "prompt": [5] * 4090})
    assert [wire["sampling"]["max_tokens"] for _, wire in fleet.transport.sent] == [16, 6]


async def test_the_replicas_context_may_be_shorter_than_the_models(make_fleet):
    fleet = make_fleet(context=100)
    async with fleet.client() as client:
        assert (await client.post(TEXT, json={"model": "tiny", "prompt": [5] * 99})).status_code == 200
        response = await client.post(TEXT, json={"model": "tiny", "prompt": [5] * 100})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_nulls_count_as_absent(fleet, chat_body):
    names = (
        "n stop temperature top_p max_tokens seed stream stream_options logprobs top_logprobs tools "
        "tool_choice response_format presence_penalty frequency_penalty user logit_bias functions "
        "cache_salt top_k min_p"
    )
    async with fleet.client() as client:
        response = await client.post(CHAT, json={**chat_body, **dict.fromkeys(names.split())})
    assert response.status_code == 200
    assert fleet.transport.sent[0][1]["sampling"]["temperature"] == 1.0


async def test_metrics(fleet, make_play, chat_body):
    fleet.transport.play = lambda *_: make_play(cached=16)
    async with fleet.client() as client:
        await client.post(CHAT, json=chat_body)
        await client.post(CHAT, json={**chat_body, "stream": True})
        await client.post(CHAT, json={})
        await client.get("/nowhere/secret")
        text = (await client.get("/metrics")).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    expected = {
        'warmroute_requests_total{endpoint="/v1/chat/completions",status="200"}': 2,
        'warmroute_requests_total{endpoint="/v1/chat/completions",status="400"}': 1,
        'warmroute_requests_total{endpoint="other",status="404"}': 1,
        "warmroute_ttft_seconds_count": 2,
        "warmroute_e2e_seconds_count": 2,
        "warmroute_routing_seconds_count": 2,
        "warmroute_prompt_tokens_sum": 58,
        "warmroute_completion_tokens_sum": 6,
        "warmroute_cached_tokens_total": 32,
        "warmroute_predicted_hit_tokens_total": 0,
        "warmroute_underpredicted_tokens_total": 32,
        "warmroute_overpredicted_tokens_total": 0,
        "warmroute_aborts_total": 0,
        "warmroute_replicas": 2,
        'warmroute_replica_inflight{replica="r0"}': 0,
        'warmroute_replica_queued_tokens{replica="r1"}': 0,
        "warmroute_placement_not_best_total": 0,
    }
    assert {name: float(lines[name]) for name in expected} == expected
    assert sum(float(v) for k, v in lines.items() if k.startswith("warmroute_placements_total")) == 2


async def test_metrics_and_logs_keep_secrets(make_fleet, caplog):
    fleet = make_fleet(api_keys={"0" * 64: "acme-corp"})
    caplog.set_level("DEBUG")
    async with fleet.client() as client:
        body = {"model": "tiny", "prompt": "my diary", "cache_salt": "pepper"}
        await client.post(TEXT, json=body, headers={"authorization": "Bearer sk-wrong"})
    found = fleet.app_metrics() + caplog.text
    assert not any(secret in found for secret in ("diary", "pepper", "sk-wrong", "acme"))


async def test_load_shows_while_requests_run(fleet, make_play):
    fleet.transport.play = lambda *_: make_play(at=0, hangs=True)
    async with fleet.client() as client:
        task = asyncio.create_task(client.post(TEXT, json={"model": "tiny", "prompt": [5] * 40}))
        await fleet.transport.hanging.wait()
        text = (await client.get("/metrics")).text
        task.cancel()
        await asyncio.wait({task})
    assert sum(f'warmroute_replica_inflight{{replica="{r}"}} 1.0' in text for r in ("r0", "r1")) == 1
    await fleet.settled()
