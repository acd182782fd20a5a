"""Streams byte for byte, and what happens when either end goes away."""

import asyncio
import json

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def events(body):
    """The payloads of an SSE body; the marker [DONE] as a string."""
    assert body.endswith(b"\n\n")
    lines = body.decode().removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [data if data == "[DONE]" else json.loads(data) for data in (line[6:] for line in lines)]


def without_facts(event):
    """An event without what differs from request to request."""
    return {k: v for k, v in event.items() if k not in ("id", "created")}


def chunk(delta, reason=None, **extra):
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return {"object": "chat.completion.chunk", "model": "tiny", "choices": [choice], **extra}


async def test_chat_stream_with_usage(fleet, chat_body):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with fleet.client() as client:
        response = await client.post(CHAT, json={**chat_body, **options})
    *parts, done = events(response.content)
    usage = {"prompt_tokens": 29, "completion_tokens": 3, "total_tokens": 32}
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in response.headers
    assert done == "[DONE]"
    assert [without_facts(part) for part in parts] == [
        chunk({"role": "assistant", "content": ""}, usage=None),
        chunk({"content": "Hello"}, usage=None),
        chunk({"content": " there"}, usage=None),
        chunk({"content": "!"}, usage=None),
        chunk({}, "stop", usage=None),
        {
            "object": "chat.completion.chunk",
            "model": "tiny",
            "choices": [],
            "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 0}},
        },
    ]
    assert len({part["id"] for part in parts}) == 1 and parts[0]["id"].startswith("chatcmpl-")
    await fleet.settled()


async def test_chat_stream_without_usage(fleet, chat_body):
    async with fleet.client() as client:
        response = await client.post(CHAT, json={**chat_body, "stream": True})
    parts = events(response.content)[:-1]
    assert [without_facts(p) for p in parts][-1] == chunk({}, "stop")
    assert all("usage" not in part for part in parts)


async def test_text_stream(fleet):
    async with fleet.client() as client:
        response = await client.post(TEXT, json={"model": "tiny", "prompt": "hi", "stream": True, "n": 2})
    *parts, done = events(response.content)
    assert done == "[DONE]"
    assert {part["object"] for part in parts} == {"text_completion"}
    assert [(p["choices"][0]["index"], p["choices"][0]["text"]) for p in parts] == [
        (index, text) for text in ("Hello", " there", "!") for index in (0, 1)
    ]
    assert [p["choices"][0]["finish_reason"] for p in parts] == [None] * 4 + ["stop"] * 2


async def test_several_prompts_in_one_stream(fleet):
    body = {"model": "tiny", "prompt": [[7], [8, 9], [5, 6, 7]], "stream": True, "n": 2}
    body["stream_options"] = {"include_usage": True}
    async with fleet.client() as client:
        response = await client.post(TEXT, json=body)
    *parts, usage, _ = events(response.content)
    texts = {}
    for part in parts:
        choice = part["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {index: "Hello there!" for index in range(6)}
    assert usage["usage"]["prompt_tokens"] == 1 + 2 + 3
    assert usage["usage"]["completion_tokens"] == 18
    await fleet.settled()


async def test_the_window_bounds_prompts_in_flight(make_fleet, make_play):
    fleet = make_fleet(prompt_window=3)
    most = 0

    def play(replica_id, request):
        nonlocal most
        stats = fleet.placement.stats().values()
        most = max(most, sum(s["queued_requests"] + s["running_requests"] for s in stats))
        return make_play()

    fleet.transport.play = play
    for stream in (False, True):
        body = {"model": "tiny", "prompt": ["a"] * 12, "stream": stream}
        async with fleet.client() as client:
            assert (await client.post(TEXT, json=body)).status_code == 200
    assert (most, len(fleet.transport.sent)) == (3, 24)
    await fleet.settled()


async def test_text_that_needs_escapes(fleet, make_play, chat_body):
    text = 'quote " backslash \\ newline \n null \0 \u2028 Grüße 🎉'
    fleet.transport.play = lambda *_: make_play(text=(text, ""))
    async with fleet.client() as client:
        response = await client.post(CHAT, json={**chat_body, "stream": True})
    contents = [p["choices"][0]["delta"].get("content") for p in events(response.content)[:-1]]
    assert contents == ["", text, None]


async def test_streamed_logprobs(fleet, make_play, chat_body):
    fleet.transport.play = lambda *_: make_play(text=("ab", "c"))
    chat = {**chat_body, "stream": True, "logprobs": True, "top_logprobs": 1}
    text = {"model": "tiny", "prompt": "hi", "stream": True, "logprobs": 1}
    async with fleet.client() as client:
        chats = events((await client.post(CHAT, json=chat)).content)
        texts = events((await client.post(TEXT, json=text)).content)
    first = {"token": "ab", "logprob": -0.5, "bytes": [97, 98]}
    assert chats[1]["choices"][0]["logprobs"] == {
        "content": [{**first, "top_logprobs": [first]}],
        "refusal": None,
    }
    assert [t["choices"][0]["logprobs"] for t in texts[:-1]] == [
        {"text_offset": [0], "token_logprobs": [-0.5], "tokens": ["ab"], "top_logprobs": [{"ab": -0.5}]},
        {"text_offset": [2], "token_logprobs": [-0.5], "tokens": ["c"], "top_logprobs": [{"c": -0.5}]},
    ]


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ({"dies": True}, 503, "replica_lost"),
        ({"error": ("internal", "x")}, 500, "replica_error"),
        ({"raises": KeyError("bug")}, 500, "internal_error"),
    ],
)
async def test_a_fault_in_the_middle_of_a_stream(fleet, make_play, chat_body, fault, status, code):
    fleet.transport.play = lambda *_: make_play(at=1, **fault)
    async with fleet.client() as client:
        response = await client.post(CHAT, json={**chat_body, "stream": True})
    parts = events(response.content)
    assert response.status_code == 200
    assert [p["choices"][0]["delta"].get("content") for p in parts[:-1]] == ["", "Hello"]
    assert parts[-1]["error"]["code"] == code
    assert set(parts[-1]["error"]) == {"message", "type", "param", "code"}
    assert fleet.metric("warmroute_requests_total", endpoint=CHAT, status=str(status)) == 1
    await fleet.settled()


async def test_a_fault_in_one_of_several_prompts(fleet, make_play):
    def play(replica_id, request):
        return make_play(at=1, dies=True) if len(request["tokens"]) == 8 else make_play(at=0, hangs=True)

    fleet.transport.play = play
    body = {"model": "tiny", "prompt": ["a", "bb", "c"], "stream": True}
    async with fleet.client() as client:
        response = await client.post(TEXT, json=body)
        whole = await client.post(TEXT, json={**body, "prompt": ["bb", "bb"], "stream": False})
    assert events(response.content)[-1]["error"]["code"] == "replica_lost"
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "replica_lost")
    await fleet.settled()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ({"dies": True}, 503, "replica_lost"),
        ({"error": ("queue_full", "")}, 429, "queue_full"),
        ({"error": ("invalid", "too odd")}, 400, "invalid_value"),
        ({"error": ("internal", "")}, 500, "replica_error"),
        ({"hangs": True}, 504, "timeout"),
    ],
)
async def test_faults_before_the_first_token(make_fleet, make_play, chat_body, stream, fault, status, code):
    fleet = make_fleet(limits={"start_timeout_s": 0.02})
    fleet.transport.play = lambda *_: make_play(**fault)
    async with fleet.client() as client:
        response = await client.post(CHAT, json={**chat_body, "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.headers.get("retry-after") == ("1" if status in (429, 503) else None)
    assert fleet.metric("warmroute_requests_total", endpoint=CHAT, status=str(status)) == 1
    await fleet.settled()


async def test_no_replica(make_fleet, chat_body):
    fleet = make_fleet(replicas=0)
    async with fleet.client() as client:
        response = await client.post(CHAT, json=chat_body)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_replica")
    assert response.headers["retry-after"] == "1"


async def test_a_timeout_in_the_middle(make_fleet, make_play, chat_body):
    fleet = make_fleet(limits={"request_timeout_s": 0.05})
    fleet.transport.play = lambda *_: make_play(at=1, hangs=True)
    async with fleet.client() as client:
        response = await client.post(CHAT, json={**chat_body, "stream": True})
        whole = await client.post(CHAT, json=chat_body)
    assert events(response.content)[-1]["error"]["code"] == "timeout"
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "timeout")
    await fleet.settled()


@pytest.mark.parametrize(("stream", "at"), [(False, None), (False, 1), (True, None), (True, 1)])
async def test_a_client_that_leaves_frees_everything(fleet, make_play, make_call, chat_body, stream, at):
    fleet.transport.play = lambda *_: make_play(at=at, hangs=True)
    call = make_call(fleet.app, CHAT, json.dumps({**chat_body, "stream": stream}).encode())
    await fleet.transport.hanging.wait()
    if stream and at:
        await call.until(lambda: b"Hello" in call.body)
    call.leave()
    await asyncio.wait_for(call.task, 1)
    await fleet.settled()
    assert fleet.metric("warmroute_requests_total", endpoint=CHAT, status="499") == 1
    assert fleet.metric("warmroute_aborts_total") == 1


@pytest.mark.parametrize(("stream", "at"), [(False, None), (False, 1), (True, None), (True, 1)])
async def test_a_server_that_cancels_the_request(fleet, make_play, make_call, chat_body, stream, at):
    fleet.transport.play = lambda *_: make_play(at=at, hangs=True)
    call = make_call(fleet.app, CHAT, json.dumps({**chat_body, "stream": stream}).encode())
    await fleet.transport.hanging.wait()
    call.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.task
    await fleet.settled()
    assert fleet.metric("warmroute_requests_total", endpoint=CHAT, status="499") == 1


async def test_a_client_that_leaves_one_of_many_prompts(fleet, make_play, make_call):
    fleet.transport.play = lambda *_: make_play(at=1, hangs=True)
    body = {"model": "tiny", "prompt": ["a"] * 20, "stream": True}
    call = make_call(fleet.app, TEXT, json.dumps(body).encode())
    await call.until(lambda: b"Hello" in call.body)
    call.leave()
    await asyncio.wait_for(call.task, 1)
    await fleet.settled()


async def test_a_client_that_stops_reading(make_fleet, make_call, chat_body):
    fleet = make_fleet(limits={"request_timeout_s": 0.03}, stall_timeout_s=0.02)
    call = make_call(fleet.app, CHAT, json.dumps({**chat_body, "stream": True}).encode())
    call.blocked = True
    await asyncio.wait_for(call.task, 1)
    await fleet.settled()
    assert fleet.metric("warmroute_requests_total", endpoint=CHAT, status="499") == 1


async def test_a_send_that_fails(fleet, make_call, chat_body):
    async def broken(message):
        raise OSError("gone")

    async def app(scope, receive, send):
        await fleet.app(scope, receive, broken)

    await make_call(app, CHAT, json.dumps({**chat_body, "stream": True}).encode()).task
    await fleet.settled()
    assert fleet.metric("warmroute_requests_total", endpoint=CHAT, status="499") == 1


async def test_headers_come_with_the_first_token_not_before(fleet, make_play, make_call, chat_body):
    fleet.transport.play = lambda *_: make_play(hangs=True)
    call = make_call(fleet.app, CHAT, json.dumps({**chat_body, "stream": True}).encode())
    await fleet.transport.hanging.wait()
    assert call.sent == []
    call.leave()
    await call.task


async def test_the_headers(fleet, make_play, chat_body):
    fleet.transport.play = lambda *_: make_play(cached=16, name="r\u00e4plica\n")
    async with fleet.client() as client:
        for stream in (False, True):
            response = await client.post(
                CHAT, json={**chat_body, "stream": stream}, headers={"x-request-id": "mine-1"}
            )
            found = {k: v for k, v in response.headers.items() if k.startswith("x-")}
            found.pop("x-accel-buffering", None)
            assert found == {
                "x-request-id": "mine-1",
                "x-warmroute-replica": "r?plica",
                "x-warmroute-predicted-tokens": "0",
                "x-warmroute-cached-tokens": "16",
                "x-warmroute-reason": found["x-warmroute-reason"],
            }
            assert found["x-warmroute-reason"] in ("load", "tie", "age")


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a\tb", "é"])
async def test_unusable_request_ids_are_replaced(fleet, given):
    async with fleet.client() as client:
        response = await client.get("/health", headers=[(b"x-request-id", given.encode())])
    assert response.headers["x-request-id"].startswith("req-")
