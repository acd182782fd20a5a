"""The real endpoint: official client, caching by the replica's truth, isolation, errors, aborts, load."""

import asyncio
import contextlib
import json
import time
import uuid
from http.client import HTTPConnection

import httpx
import openai
import pytest

MODEL = "smollm2-135m"
pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow]


def long_prompt(words: int = 300) -> str:
    """A prompt nobody has sent before, several blocks long."""
    return f"Report {uuid.uuid4()}. " + " ".join(f"Item {i} is {i * i % 97}." for i in range(words // 4))


def body(prompt: str, **more) -> dict:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 4,
        "temperature": 0,
        **more,
    }


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


LEDGER = ("queued_requests", "running_requests", "queued_tokens", "running_tokens")


def quiet(endpoint, names: tuple[str, ...] = (*LEDGER, "held_blocks")) -> bool:
    """Every figure of the ledger is exactly zero, and no block is held."""
    gauges = endpoint.metrics()
    return all(value == 0 for name in names for value in gauges[f"warmroute_replica_{name}"].values())


def test_the_official_client_works_unchanged(endpoint) -> None:
    client = openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.key)
    assert [m.id for m in client.models.list()] == [MODEL]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
    assert "Paris" in whole.choices[0].message.content
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    text = client.completions.create(model=MODEL, prompt="2 + 2 =", max_tokens=3, temperature=0)
    assert text.usage.completion_tokens == 3


def test_a_repeated_prompt_goes_where_it_is_cached(endpoint) -> None:
    with endpoint.client() as http:
        prompt = long_prompt()
        first = http.post("/v1/chat/completions", json=body(prompt))
        assert cached(first) < 64  # at most the template's own beginning
        home = first.headers["x-warmroute-replica"]
        for _ in range(3):
            again = http.post("/v1/chat/completions", json=body(prompt))
            prompt_tokens = again.json()["usage"]["prompt_tokens"]
            full_blocks = (prompt_tokens - 1) // 16 * 16
            assert again.headers["x-warmroute-replica"] == home
            assert cached(again) >= full_blocks
            assert int(again.headers["x-warmroute-cached-tokens"]) == cached(again)
            assert full_blocks <= int(again.headers["x-warmroute-predicted-tokens"]) < prompt_tokens
            assert again.json()["choices"] == first.json()["choices"]


def test_tenants_and_salts_share_nothing(endpoint) -> None:
    prompt = long_prompt()
    other = {"authorization": "Bearer key-of-b"}
    with endpoint.client() as http:
        assert cached(http.post("/v1/chat/completions", json=body(prompt))) < 64
        assert cached(http.post("/v1/chat/completions", json=body(prompt), headers=other)) < 64
        assert cached(http.post("/v1/chat/completions", json=body(prompt, cache_salt="s"))) == 0
        assert cached(http.post("/v1/chat/completions", json=body(prompt))) > 200
        assert cached(http.post("/v1/chat/completions", json=body(prompt), headers=other)) > 200
        assert cached(http.post("/v1/chat/completions", json=body(prompt, cache_salt="s"))) > 200


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"messages": []}, 400),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400),
        ({"model": "gpt-x"}, 404),
        ({"max_tokens": 0}, 400),
        ({"max_tokens": 9000}, 400),
        ({"n": 0}, 400),
        ({"temperature": -1}, 400),
        ({"temperature": "hot"}, 400),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400),
    ],
)
def test_bad_requests_get_openais_errors(endpoint, change: dict, status: int) -> None:
    with endpoint.client() as http:
        answer = http.post("/v1/chat/completions", json={**body("hello"), **change})
        assert answer.status_code == status, answer.text
        assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}


def test_malformed_json_bad_key_and_unknown_path(endpoint) -> None:
    with endpoint.client() as http:
        broken = http.post(
            "/v1/chat/completions", content=b'{"model": ', headers={"content-type": "application/json"}
        )
        stranger = http.post(
            "/v1/chat/completions", json=body("x"), headers={"authorization": "Bearer nobody"}
        )
        nowhere = http.get("/v1/nowhere")
    assert [r.status_code for r in (broken, stranger, nowhere)] == [400, 401, 404]
    assert all("message" in r.json()["error"] for r in (broken, stranger, nowhere))


def raw_post(endpoint, *headers: bytes) -> tuple[int, dict]:
    """A completion with raw header lines, which no HTTP library would send; its status and JSON body."""
    content = json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 1}).encode()
    host, port = endpoint.url.removeprefix("http://").split(":")
    connection = HTTPConnection(host, int(port), timeout=30)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("authorization", f"Bearer {endpoint.key}")
        connection.putheader("content-length", str(len(content)))
        for line in headers:
            name, _, value = line.partition(b": ")
            connection.putheader(name, value)
        connection.endheaders(content)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@pytest.mark.parametrize("name", [b"x-request-id", b"x-session-id", b"serve_multiplexed_model_id"])
def test_headers_that_serve_cannot_decode(endpoint, name: bytes) -> None:
    status, answer = raw_post(endpoint, name + b": \xff\xfe")
    assert (status, answer["error"]["code"]) == (400, "invalid_header")


def test_a_post_that_wants_to_be_a_websocket_is_answered(endpoint) -> None:
    wish = (b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-version: 13")
    status, answer = raw_post(endpoint, *wish, b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==")
    assert (status, answer["usage"]["completion_tokens"]) == (200, 1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_everything(endpoint, stream: bool) -> None:
    wait_for = endpoint.wait_for
    wait_for(lambda: quiet(endpoint), 10, "quiet before the test")

    async def leave() -> None:
        async with endpoint.async_client() as http:
            request = body(long_prompt(), max_tokens=400, stream=stream, ignore_eos=True)
            task = asyncio.create_task(_consume(http, request))
            await asyncio.sleep(1.5)
            assert not quiet(endpoint)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    assert wait_for(lambda: quiet(endpoint, LEDGER), 5, "the ledger free") < 1.0
    wait_for(lambda: quiet(endpoint), 5, "blocks free, as the replica reports every half second")


async def _consume(http: httpx.AsyncClient, request: dict) -> tuple[str, dict]:
    """Send one request; returns its text and usage."""
    if not request.get("stream"):
        answer = await http.post("/v1/chat/completions", json=request)
        return answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]
    text, usage = "", {}
    async with http.stream("POST", "/v1/chat/completions", json=request) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line[6:])
                assert "error" not in event, event
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
    return text, usage


def test_64_concurrent_streams_finish_and_leave_exact_zeros(endpoint) -> None:
    system = long_prompt(120)

    async def all_at_once() -> list[tuple[str, dict]]:
        async with endpoint.async_client(limits=httpx.Limits(max_connections=64)) as http:
            requests = [
                body(
                    f"{system} Question {i % 16}?",
                    max_tokens=6,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                for i in range(64)
            ]
            return await asyncio.gather(*(_consume(http, request) for request in requests))

    answers = asyncio.run(all_at_once())
    assert len(answers) == 64
    assert all(usage["completion_tokens"] >= 1 for _, usage in answers)
    by_question = [{answers[i][0] for i in range(q, 64, 16)} for q in range(16)]
    assert all(len(texts) == 1 for texts in by_question)  # batch neighbours change no answer
    endpoint.wait_for(lambda: quiet(endpoint), 5, "quiet after the load")
    gauges = endpoint.metrics()
    for replica in endpoint.replicas():
        free, kept = (gauges[f"warmroute_replica_{kind}_blocks"][replica] for kind in ("free", "cached"))
        assert free + kept == endpoint.num_blocks


def losses(endpoint) -> str:
    """The line of /metrics that counts replicas taken for lost."""
    text = httpx.get(f"{endpoint.url}/metrics", headers=endpoint.headers).text
    return next(line for line in text.splitlines() if line.startswith("warmroute_replica_losses_total"))


def test_health_is_answered_while_a_long_prefill_runs(endpoint) -> None:
    fleet, lost = endpoint.replicas(), losses(endpoint)

    async def busy() -> float:
        async with endpoint.async_client() as http:
            prefills = [asyncio.create_task(_consume(http, body(long_prompt(2000)))) for _ in range(2)]
            await asyncio.sleep(0.5)
            slowest = 0.0
            for _ in range(10):
                started = time.monotonic()
                assert (await http.get("/health")).status_code == 200
                slowest = max(slowest, time.monotonic() - started)
            assert not any(task.done() for task in prefills)
            await asyncio.gather(*prefills)
            return slowest

    assert asyncio.run(busy()) < 2.0
    assert (endpoint.replicas(), losses(endpoint)) == (fleet, lost)  # a slow replica is not a lost one


@pytest.mark.parametrize("stream", [True, False])
def test_many_prompts_in_one_request_are_all_answered(endpoint, stream: bool) -> None:
    request = {
        "model": MODEL,
        "prompt": [f"{uuid.uuid4()} says" for _ in range(12)],
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }
    with endpoint.client() as http:
        answer = http.post("/v1/completions", json=request)
    assert answer.status_code == 200, answer.text
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert {choice["index"] for event in events for choice in event["choices"]} == set(range(12))
        usage = events[-1]["usage"]
    else:
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(12))
        usage = answer.json()["usage"]
    assert usage["completion_tokens"] == 24
    endpoint.wait_for(lambda: quiet(endpoint), 5, "quiet after the prompts")
