"""Bodies built to be expensive: what they are refused for, and that strings may hold any bracket."""

import asyncio
import json
import threading

import pytest

from router.api.body import MAX_CONTAINERS, count_containers, parse_json
from router.api.errors import ApiError
from router.api.pool import BodyPool
from router.api.prepare import split_prompts

TOO_LONG = "context_length_exceeded"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def test_as_many_arrays_and_objects_as_are_allowed():
    assert len(parse_json(b"[" + b",".join([b"[]"] * (MAX_CONTAINERS - 1)) + b"]")) == MAX_CONTAINERS - 1
    with pytest.raises(ApiError, match="more than 65536 arrays and objects"):
        parse_json(b"[" + b",".join([b"[]"] * MAX_CONTAINERS) + b"]")


@pytest.mark.parametrize(
    "text", ["[" * 70_000, '{"' * 70_000, '\\"[' * 70_000, '[\\\\"' * 70_000, '"[\\' * 70_000]
)
def test_brackets_inside_strings_do_not_count(text):
    value = {"prompt": [text, [text], {"a": text}]}
    assert count_containers(json.dumps(value).encode()) == 4
    assert parse_json(json.dumps(value).encode()) == value


async def test_a_client_hears_why(fleet):
    body = b'{"model":"tiny","prompt":[' + b",".join([b"[1]"] * 70_000) + b"]}"
    async with fleet.client() as client:
        answers = [await client.post(path, content=body) for path in (TEXT, CHAT, "/tokenize", "/detokenize")]
    assert [a.status_code for a in answers] == [400] * 4
    assert {a.json()["error"]["code"] for a in answers} == {"invalid_json"}


def test_the_number_of_prompts_is_checked_before_their_shapes():
    with pytest.raises(ApiError, match="At most 128 answers"):
        split_prompts([[object()]] * 129, 1, 128)
    with pytest.raises(ApiError, match="At most 128 answers"):
        split_prompts(["a"] * 65, 2, 128)
    assert split_prompts(["a"] * 64, 2, 128) == ["a"] * 64
    assert split_prompts([1] * 200, 128, 128) == [[1] * 200]


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/tokenize", {"prompt": "a" * 13 * 4096}, TOO_LONG),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a" * 13 * 4096}]},
            "context_length_exceeded",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{"x": "a" * 13 * 4096}]}, TOO_LONG),
        ("/detokenize", {"tokens": [5] * 4097}, "invalid_value"),
        (TEXT, {"model": "tiny", "prompt": [5] * 4096}, TOO_LONG),
    ],
)
async def test_what_cannot_fit_is_refused_unread(fleet, path, body, code):
    """The tiny model's context is 4,096 tokens, its longest token 13 bytes."""
    async with fleet.client() as client:
        answer = await client.post(path, json={"model": "tiny", **body})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


async def test_texts_longer_than_the_context_can_still_be_counted(fleet):
    async with fleet.client() as client:
        counted = await client.post("/tokenize", json={"prompt": "a" * (13 * 4096 - 1)})
        text = await client.post("/detokenize", json={"tokens": [5] * 4096})
    assert (counted.status_code, counted.json()["count"]) == (200, 13 * 4096 - 1)
    assert text.status_code == 200


async def test_the_pool_runs_long_bodies_elsewhere_and_short_ones_here():
    pool = BodyPool(threads=1, inline_bytes=4, max_pending=1)
    here = threading.get_ident()
    assert await pool.run(lambda body: threading.get_ident(), b"1234") == here
    assert await pool.run(lambda body: threading.get_ident(), b"12345") != here
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda body: 1 // 0, b"12345")


async def test_the_pool_is_bounded_also_by_work_that_nobody_waits_for():
    pool = BodyPool(threads=1, inline_bytes=0, max_pending=1)
    go = threading.Event()
    task = asyncio.create_task(pool.run(lambda body: go.wait(30), b"1"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    with pytest.raises(ApiError) as refused:
        await pool.run(lambda body: None, b"2")
    assert (refused.value.status, refused.value.headers) == (429, {"retry-after": "1"})
    go.set()
    while pool._pending:
        await asyncio.sleep(0)
    assert await pool.run(lambda body: body, b"3") == b"3"
