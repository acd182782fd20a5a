"""Every mistake a client can make gets OpenAI's error shape, the right status, param and code."""

import json

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
LONG = "x" * 5000


def chat(**fields):
    return {"model": "tiny", "messages": HI, **fields}


def text(**fields):
    return {"model": "tiny", "prompt": "hi", **fields}


TOOL_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}

BODIES = [
    # path, body, status, param, code
    (CHAT, {"messages": HI}, 400, "model", "missing_required_parameter"),
    (CHAT, {"model": 1, "messages": HI}, 400, "model", "invalid_type"),
    (CHAT, {"model": "gpt-4", "messages": HI}, 404, "model", "model_not_found"),
    (TEXT, {"model": "gpt-4", "prompt": "hi"}, 404, "model", "model_not_found"),
    (CHAT, {"model": "tiny"}, 400, "messages", "missing_required_parameter"),
    (CHAT, chat(messages=[]), 400, "messages", "empty_array"),
    (CHAT, chat(messages="hi"), 400, "messages", "invalid_type"),
    (CHAT, chat(messages=["hi"]), 400, "messages[0]", "invalid_type"),
    (CHAT, chat(messages=[{"content": "hi"}]), 400, "messages[0].role", "missing_required_parameter"),
    (CHAT, chat(messages=[*HI, {"role": "wizard", "content": ""}]), 400, "messages[1].role", "invalid_value"),
    (CHAT, chat(messages=[{"role": 3, "content": ""}]), 400, "messages[0].role", "invalid_type"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0].content", "missing_required_parameter"),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content", "invalid_type"),
    (CHAT, chat(messages=[{"role": "user", "content": []}]), 400, "messages[0].content", "empty_array"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]),
        400,
        "messages[0].content[0].type",
        "invalid_value",
    ),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": 1}]}]),
        400,
        "messages[0].content[0].text",
        "invalid_type",
    ),
    (CHAT, chat(messages=[{**HI[0], "name": 4}]), 400, "messages[0].name", "invalid_type"),
    (
        CHAT,
        chat(messages=[*HI, {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}]),
        400,
        "messages[1].tool_calls[0].function.arguments",
        "invalid_value",
    ),
    (
        CHAT,
        chat(messages=[*HI, {"role": "assistant", "content": "", "tool_calls": [3]}]),
        400,
        "messages[1].tool_calls[0]",
        "invalid_type",
    ),
    (CHAT, chat(messages=[{"role": "user", "content": LONG}]), 400, "messages", "context_length_exceeded"),
    (CHAT, chat(max_tokens=4096), 400, "messages", "context_length_exceeded"),
    (CHAT, chat(max_completion_tokens=4096), 400, "messages", "context_length_exceeded"),
    (TEXT, text(prompt=LONG), 400, "prompt", "context_length_exceeded"),
    (TEXT, text(max_tokens=4095), 400, "prompt", "context_length_exceeded"),
    (TEXT, text(prompt="x" * 4096), 400, "prompt", "context_length_exceeded"),
    (TEXT, {"model": "tiny"}, 400, "prompt", "missing_required_parameter"),
    (TEXT, text(prompt=""), 400, "prompt", "empty_prompt"),
    (TEXT, text(prompt=[]), 400, "prompt", "empty_prompt"),
    (TEXT, text(prompt=["a", ""]), 400, "prompt", "empty_prompt"),
    (TEXT, text(prompt=[[]]), 400, "prompt", "empty_prompt"),
    (TEXT, text(prompt=None), 400, "prompt", "invalid_type"),
    (TEXT, text(prompt={"a": 1}), 400, "prompt", "invalid_type"),
    (TEXT, text(prompt=[1, "a"]), 400, "prompt", "invalid_type"),
    (TEXT, text(prompt=[1, True]), 400, "prompt", "invalid_type"),
    (TEXT, text(prompt=["a", [1]]), 400, "prompt", "invalid_type"),
    (TEXT, text(prompt=[259]), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=[-1]), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=[10**30]), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=["a"] * 129), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=["a"] * 65, n=2), 400, "prompt", "invalid_value"),
    (TEXT, text(echo=True), 400, "echo", "unsupported_parameter"),
    (TEXT, text(suffix="x"), 400, "suffix", "unsupported_parameter"),
    (TEXT, text(logprobs=21), 400, "logprobs", "invalid_value"),
    (TEXT, text(logprobs=True), 400, "logprobs", "invalid_type"),
    (CHAT, chat(n=0), 400, "n", "invalid_value"),
    (CHAT, chat(n=129), 400, "n", "invalid_value"),
    (CHAT, chat(n="2"), 400, "n", "invalid_type"),
    (CHAT, chat(n=1.5), 400, "n", "invalid_type"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", "invalid_value"),
    (CHAT, chat(max_tokens=-1), 400, "max_tokens", "invalid_value"),
    (CHAT, chat(max_tokens=True), 400, "max_tokens", "invalid_type"),
    (CHAT, chat(max_tokens=10**400), 400, "max_tokens", "invalid_value"),
    (CHAT, chat(max_completion_tokens=0), 400, "max_completion_tokens", "invalid_value"),
    (CHAT, chat(temperature=-0.1), 400, "temperature", "invalid_value"),
    (CHAT, chat(temperature=2.1), 400, "temperature", "invalid_value"),
    (CHAT, chat(temperature="hot"), 400, "temperature", "invalid_type"),
    (CHAT, chat(top_p=0), 400, "top_p", "invalid_value"),
    (CHAT, chat(top_p=1.01), 400, "top_p", "invalid_value"),
    (CHAT, chat(presence_penalty=3), 400, "presence_penalty", "invalid_value"),
    (CHAT, chat(frequency_penalty=-3), 400, "frequency_penalty", "invalid_value"),
    (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty", "invalid_value"),
    (CHAT, chat(top_k=-2), 400, "top_k", "invalid_value"),
    (CHAT, chat(min_p=1.5), 400, "min_p", "invalid_value"),
    (CHAT, chat(seed=2**63), 400, "seed", "invalid_value"),
    (CHAT, chat(stop=["a"] * 17), 400, "stop", "invalid_value"),
    (CHAT, chat(stop=""), 400, "stop", "invalid_value"),
    (CHAT, chat(stop=["a", 1]), 400, "stop[1]", "invalid_type"),
    (CHAT, chat(stop_token_ids=[259]), 400, "stop_token_ids", "invalid_value"),
    (CHAT, chat(stop_token_ids=[-1]), 400, "stop_token_ids", "invalid_value"),
    (CHAT, chat(min_tokens=5, max_tokens=4), 400, "min_tokens", "invalid_value"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs", "invalid_value"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "invalid_value"),
    (CHAT, chat(logprobs=1), 400, "logprobs", "invalid_type"),
    (CHAT, chat(stream="yes"), 400, "stream", "invalid_type"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options", "invalid_value"),
    (CHAT, chat(stream=True, stream_options=3), 400, "stream_options", "invalid_type"),
    (
        CHAT,
        chat(stream=True, stream_options={"include_usage": 1}),
        400,
        "stream_options.include_usage",
        "invalid_type",
    ),
    (CHAT, chat(tools={"a": 1}), 400, "tools", "invalid_type"),
    (CHAT, chat(tools=[1]), 400, "tools[0]", "invalid_type"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice", "unsupported_parameter"),
    (CHAT, chat(tool_choice={"type": "function"}), 400, "tool_choice", "unsupported_parameter"),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "response_format", "unsupported_parameter"),
    (CHAT, chat(chat_template_kwargs=[]), 400, "chat_template_kwargs", "invalid_type"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), 400, "messages", "invalid_value"),
    (CHAT, chat(functions=[{"name": "f"}]), 400, "functions", "unsupported_parameter"),
    (CHAT, chat(logit_bias={"5": 10}), 400, "logit_bias", "unsupported_parameter"),
    (CHAT, chat(modalities=["text", "audio"]), 400, "modalities", "unsupported_parameter"),
    (CHAT, chat(cache_salt=""), 400, "cache_salt", "invalid_value"),
    (CHAT, chat(cache_salt="s" * 257), 400, "cache_salt", "invalid_value"),
    (CHAT, chat(cache_salt=7), 400, "cache_salt", "invalid_type"),
    (CHAT, chat(no_cache="no"), 400, "no_cache", "invalid_type"),
    (CHAT, chat(user=5), 400, "user", "invalid_type"),
    ("/tokenize", {"model": "gpt-4", "prompt": "a"}, 404, "model", "model_not_found"),
    ("/tokenize", {}, 400, "prompt", "missing_required_parameter"),
    ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt", "missing_required_parameter"),
    ("/tokenize", {"prompt": 1}, 400, "prompt", "invalid_type"),
    ("/tokenize", {"messages": []}, 400, "messages", "empty_array"),
    ("/detokenize", {}, 400, "tokens", "missing_required_parameter"),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]", "invalid_type"),
    ("/detokenize", {"tokens": [300]}, 400, "tokens", "invalid_value"),
]

RAW = [
    # name, body, status, code
    ("empty", b"", 400, "invalid_json"),
    ("cut off", b'{"model": "tiny"', 400, "invalid_json"),
    ("not json", b"model=tiny", 400, "invalid_json"),
    ("array", b"[]", 400, "invalid_json"),
    ("string", b'"hi"', 400, "invalid_json"),
    ("null", b"null", 400, "invalid_json"),
    ("not utf-8", b'{"model": "\xff"}', 400, "invalid_json"),
    ("utf-16", json.dumps(chat()).encode("utf-16"), 400, "invalid_json"),
    (
        "NaN",
        b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"temperature":NaN}',
        400,
        "invalid_json",
    ),
    ("Infinity", b'{"model":"tiny","messages":[],"temperature":-Infinity}', 400, "invalid_json"),
    (
        "huge float",
        b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"top_p":1e999}',
        400,
        "invalid_value",
    ),
    ("endless integer", b'{"model":"tiny","n":' + b"9" * 5000 + b"}", 400, "invalid_json"),
    ("deep", b'{"model":"tiny","metadata":' + b"[" * 70 + b"]" * 70 + b"}", 400, "invalid_json"),
    ("very deep", b"[" * 100_000, 400, "invalid_json"),
    (
        "lone surrogate",
        b'{"model":"tiny","messages":[{"role":"user","content":"\\ud83d"}]}',
        400,
        "invalid_unicode",
    ),
    (
        "reversed pair",
        b'{"model":"tiny","messages":[{"role":"user","content":"\\udc00\\ud800"}]}',
        400,
        "invalid_unicode",
    ),
    (
        "raw surrogate",
        b'{"model":"tiny","messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
        400,
        "invalid_json",
    ),
]


def shaped(response):
    """The error object, after checking that it is exactly OpenAI's."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return body["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    BODIES,
    ids=lambda v: json.dumps(v)[:60] if isinstance(v, dict) else None,
)
async def test_mistakes_in_bodies(fleet, path, body, status, param, code):
    async with fleet.client() as client:
        response = await client.post(path, json=body)
    error = shaped(response)
    assert (response.status_code, error["param"], error["code"]) == (status, param, code), error
    assert error["type"] == "invalid_request_error"
    assert fleet.transport.sent == []


@pytest.mark.parametrize(("body", "status", "code"), [row[1:] for row in RAW], ids=[row[0] for row in RAW])
async def test_mistakes_in_json(fleet, body, status, code):
    async with fleet.client() as client:
        response = await client.post(CHAT, content=body)
    assert (response.status_code, shaped(response)["code"]) == (status, code)
    assert fleet.transport.sent == []


async def test_the_whole_error_object(fleet):
    async with fleet.client() as client:
        response = await client.post(CHAT, json=chat(max_tokens=4090))
    assert response.json() == {
        "error": {
            "message": "This model's maximum context length is 4096 tokens. However, you requested 4111 "
            "tokens (21 in the messages, 4090 in the completion). Please reduce one of them.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }


async def test_error_messages_do_not_quote_the_input(fleet):
    async with fleet.client() as client:
        for secret in (chat(cache_salt=["sesame"]), chat(stop={"sesame": 1}), text(prompt={"sesame": 2})):
            response = await client.post(CHAT if "messages" in secret else TEXT, json=secret)
            assert response.status_code == 400
            assert "sesame" not in response.text


async def test_unknown_paths_and_methods(fleet):
    async with fleet.client() as client:
        missing = await client.get("/v1/nothing")
        wrong = await client.get(CHAT)
        model = await client.get("/v1/models/gpt-4")
    assert (missing.status_code, shaped(missing)["code"]) == (404, "unknown_url")
    assert (wrong.status_code, shaped(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert (model.status_code, shaped(model)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/json; charset=utf-8"]
)
async def test_any_content_type_will_do(fleet, content_type):
    async with fleet.client() as client:
        response = await client.post(CHAT, content=json.dumps(chat()), headers={"content-type": content_type})
    assert response.status_code == 200


async def test_compressed_bodies_are_refused(fleet):
    async with fleet.client() as client:
        response = await client.post(CHAT, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert (response.status_code, shaped(response)["code"]) == (415, "unsupported_encoding")


async def test_long_bodies(make_fleet):
    fleet = make_fleet(max_body_bytes=2000)

    async def chunks():
        for _ in range(100):
            yield b" " * 100
        raise AssertionError("read on after the limit")

    async with fleet.client() as client:
        declared = await client.post(CHAT, content=b" " * 2001)
        chunked = await client.post(CHAT, content=chunks())
        fits = await client.post(CHAT, content=json.dumps(chat()).encode().ljust(2000))
    assert (declared.status_code, shaped(declared)["code"]) == (413, "request_too_large")
    assert (chunked.status_code, shaped(chunked)["code"]) == (413, "request_too_large")
    assert fits.status_code == 200


async def test_a_body_that_never_comes(make_fleet, make_call):
    fleet = make_fleet(body_timeout_s=0.02)
    call = make_call(fleet.app, CHAT, b"")
    call._incoming.get_nowait()
    await call.task
    assert call.sent[0]["status"] == 408
    assert json.loads(call.body)["error"]["code"] == "request_timeout"


async def test_a_client_that_leaves_while_sending(fleet, make_call):
    call = make_call(fleet.app, CHAT, b"")
    call._incoming.get_nowait()
    call.leave()
    await call.task
    assert call.sent[0]["status"] == 499
    assert fleet.metric("warmroute_requests_total", endpoint=CHAT, status="499") == 1


async def test_what_nobody_expected_is_a_clean_500(fleet, make_play, caplog):
    fleet.transport.play = lambda *_: make_play(raises=ZeroDivisionError("secret detail"))
    async with fleet.client() as client:
        response = await client.post(CHAT, json=chat())
    assert (response.status_code, shaped(response)["code"]) == (500, "internal_error")
    assert "secret detail" not in response.text
    assert "ZeroDivisionError: secret detail" in caplog.text
    assert fleet.metric("warmroute_internal_errors_total") == 1
    await fleet.settled()
