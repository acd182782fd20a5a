"""The official client, unchanged, against the application."""

import openai
import pytest

httpx2 = pytest.importorskip("httpx2") if openai.__version__ >= "3" else pytest.importorskip("httpx")

MESSAGES = [{"role": "user", "content": "Say hello."}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]


@pytest.fixture
def make_client():
    def make(fleet, **options):
        transport = httpx2.ASGITransport(app=fleet.app, client=("127.0.0.1", 4000))
        http = httpx2.AsyncClient(transport=transport, base_url="http://test/v1")
        options = {"api_key": "sk-any", "max_retries": 0, **options}
        return openai.AsyncOpenAI(base_url="http://test/v1", http_client=http, **options)

    return make


async def test_chat(fleet, make_play, make_client):
    fleet.transport.play = lambda *_: make_play(cached=16)
    answer = await make_client(fleet).chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, temperature=0, seed=7, stop=["\n"], max_completion_tokens=5
    )
    assert [c.message.content for c in answer.choices] == ["Hello there!"] * 2
    assert [c.index for c in answer.choices] == [0, 1]
    assert [c.finish_reason for c in answer.choices] == ["stop"] * 2
    assert answer.choices[0].message.role == "assistant"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        29,
        6,
        35,
    )
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert fleet.transport.sent[0][1]["sampling"] == {
        "n": 2,
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 7,
        "stop": ["\n"],
        "stop_token_ids": [],
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": None,
        "ignore_eos": False,
        "min_tokens": 0,
    }


async def test_chat_stream(fleet, make_client):
    stream = await make_client(fleet).chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there!"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 3


async def test_chat_stream_helper(fleet, make_client):
    async with make_client(fleet).chat.completions.stream(model="tiny", messages=MESSAGES, n=2) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert [c.message.content for c in final.choices] == ["Hello there!"] * 2


async def test_chat_logprobs(fleet, make_client):
    answer = await make_client(fleet).chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["Hello", " there", "!"]
    assert [top.token for top in content[0].top_logprobs] == ["Hello", "alt1"]
    assert content[0].bytes == list(b"Hello")


async def test_tools_and_parts(fleet, make_client):
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "utc"}'}}
    messages = [
        {"role": "developer", "content": "Be short."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What time"}, {"type": "text", "text": " is it?"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    client = make_client(fleet)
    plain = await client.chat.completions.create(model="tiny", messages=messages)
    tools = await client.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, tool_choice="auto", parallel_tool_calls=False
    )
    assert tools.usage.prompt_tokens > plain.usage.prompt_tokens > 29


async def test_text_prompts(fleet, make_client):
    client = make_client(fleet)
    one = await client.completions.create(model="tiny", prompt="hi", logprobs=1, max_tokens=4)
    assert one.choices[0].text == "Hello there!"
    assert one.choices[0].logprobs.tokens == ["Hello", " there", "!"]
    assert one.choices[0].logprobs.text_offset == [0, 5, 11]
    assert one.choices[0].logprobs.top_logprobs[1] == {" there": -0.5}
    many = await client.completions.create(model="tiny", prompt=["a", "b", "c"], n=2)
    assert [c.index for c in many.choices] == [0, 1, 2, 3, 4, 5]
    assert (many.usage.prompt_tokens, many.usage.completion_tokens) == (3, 18)
    ids = await client.completions.create(model="tiny", prompt=[5, 6, 7], echo=False, best_of=1, suffix=None)
    assert ids.usage.prompt_tokens == 3
    lists = await client.completions.create(model="tiny", prompt=[[5, 6], [7]])
    assert len(lists.choices) == 2


async def test_text_stream(fleet, make_client):
    stream = await make_client(fleet).completions.create(model="tiny", prompt="hi", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello there!"


async def test_models(fleet, make_client):
    client = make_client(fleet)
    assert [model.id async for model in client.models.list()] == ["tiny", "alias/of-tiny"]
    assert (await client.models.retrieve("alias/of-tiny")).owned_by == "warmroute"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-4")


async def test_extensions_in_extra_body(fleet, make_client):
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
        "min_tokens": 2,
        "stop_token_ids": [9],
        "cache_salt": "pepper",
        "no_cache": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "some_other_server": {"option": [1]},
    }
    await make_client(fleet).chat.completions.create(model="tiny", messages=MESSAGES, extra_body=extra)
    sent = fleet.transport.sent[0][1]
    assert {k: sent["sampling"][k] for k in list(extra)[:6]} == {k: extra[k] for k in list(extra)[:6]}
    assert sent["namespace"] == {"tenant": None, "salt": "pepper", "adapter": None}
    assert sent["cache"] == {"read": False, "publish": False}


async def test_errors_are_the_clients_own_exceptions(fleet, make_play, make_client):
    client = make_client(fleet)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10_000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    fleet.transport.play = lambda *_: make_play(error=("queue_full", ""))
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(model="tiny", messages=MESSAGES)


async def test_an_error_in_a_stream_raises(fleet, make_play, make_client):
    fleet.transport.play = lambda *_: make_play(at=1, dies=True)
    stream = await make_client(fleet).chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="replica was lost"):
        [chunk async for chunk in stream]


async def test_the_client_waits_and_tries_again_when_told(fleet, make_play, make_client, monkeypatch):
    plays = [make_play(error=("queue_full", ""))] * 2 + [make_play()]
    fleet.transport.play = lambda *_: plays.pop(0)
    waits = []

    async def sleep(self, **kwargs):
        waits.append(self._calculate_retry_timeout(1, kwargs["options"], kwargs["response"].headers))

    monkeypatch.setattr(openai.AsyncOpenAI, "_sleep_for_retry", sleep)
    client = make_client(fleet, max_retries=1)
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello there!"
    assert waits == [1.0]
