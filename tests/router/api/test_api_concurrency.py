"""Many requests with every kind of ending at once: afterwards every figure is exactly zero."""

import asyncio
import gc
import json
import random
import threading

import numpy as np

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def test_two_hundred_endings(make_fleet, make_play, make_call, caplog):
    rng = random.Random(1)
    fleet = make_fleet(replicas=5, limits={"request_timeout_s": 0.5, "start_timeout_s": 0.3})
    faults = [
        {},
        {},
        {"dies": True},
        {"ends_early": True},
        {"hangs": True},
        {"error": ("queue_full", "")},
        {"error": ("internal", "")},
        {"error": ("invalid", "")},
        {"raises": KeyError("bug")},
    ]
    fleet.transport.play = lambda *_: make_play(at=rng.choice([None, 0, 1, 2]), **rng.choice(faults))
    outcomes = set()

    async def one(number):
        body = {
            "model": "tiny",
            "prompt": [[5] * rng.randint(1, 200)] * rng.choice([1, 1, 3]),
            "n": rng.randint(1, 3),
        }
        call = make_call(fleet.app, TEXT, json.dumps({**body, "stream": rng.random() < 0.5}).encode())
        ending = rng.choice(["stay", "stay", "leave", "cancel"])
        if ending != "stay":
            await asyncio.sleep(rng.random() * 0.02)
            call.leave() if ending == "leave" else call.task.cancel()
        await asyncio.wait({call.task}, timeout=5)
        assert call.task.done()
        outcomes.add(call.sent[0]["status"] if call.sent else None)

    await asyncio.gather(*(one(number) for number in range(200)))
    await fleet.settled()
    gc.collect()
    assert "never retrieved" not in caplog.text
    assert {200, 400, 500} <= outcomes
    counted = [
        line for line in fleet.app_metrics().splitlines() if line.startswith("warmroute_requests_total{")
    ]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in counted) == 200


async def test_streams_side_by_side_do_not_mix(fleet, make_play):
    def play(replica_id, request):
        length = len(request["tokens"]) // 4
        return make_play(text=tuple(f"{length}." for _ in range(5)))

    fleet.transport.play = play
    async with fleet.client() as client:

        async def one(length):
            body = {"model": "tiny", "prompt": [7] * length, "stream": True}
            response = await client.post(TEXT, json=body)
            parts = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
            return "".join(part["choices"][0]["text"] for part in parts)

        texts = await asyncio.gather(*(one(length) for length in range(1, 65)))
    assert texts == [f"{length}." * 5 for length in range(1, 65)]
    await fleet.settled()


async def test_the_loop_is_free_while_long_bodies_are_computed(fleet, monkeypatch):
    """The codec waits until /health has been answered meanwhile; on the event loop that could not be."""
    entered, answered = threading.Event(), threading.Event()

    def waits(self, *_, **__):
        entered.set()
        assert answered.wait(30)
        return np.arange(3, dtype=np.int32)

    for name in ("encode_text", "encode_chat", "decode"):
        monkeypatch.setattr(type(fleet.codec), name, waits)
    long = "word " * 1000
    bodies = {
        "/tokenize": {"prompt": long},
        "/detokenize": {"tokens": [5] * 3000},
        TEXT: {"model": "tiny", "prompt": long},
        CHAT: {"model": "tiny", "messages": [{"role": "user", "content": long}]},
    }
    async with fleet.client() as client:
        for path, body in bodies.items():
            entered.clear()
            answered.clear()
            task = asyncio.create_task(client.post(path, json=body))
            await asyncio.to_thread(entered.wait, 30)
            assert (await client.get("/health")).status_code == 200
            answered.set()
            assert (await task).status_code != 429


async def test_a_client_that_leaves_while_its_body_is_checked_gets_nothing(fleet, make_call, monkeypatch):
    entered, go = threading.Event(), threading.Event()

    def waits(self, *_):
        entered.set()
        assert go.wait(30)
        return np.arange(3, dtype=np.int32)

    monkeypatch.setattr(type(fleet.codec), "encode_text", waits)
    call = make_call(fleet.app, TEXT, json.dumps({"model": "tiny", "prompt": "word " * 1000}).encode())
    await asyncio.to_thread(entered.wait, 30)
    call.leave()
    await call.task
    go.set()
    assert fleet.transport.sent == []
    assert fleet.metric("warmroute_requests_total", endpoint=TEXT, status="499") == 1
