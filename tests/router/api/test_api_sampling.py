"""`best_of` and beam search: what replicas are asked, what is refused, what is reserved and counted."""

import asyncio

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BEAM = {"use_beam_search": True, "n": 2}
BEST = "'best_of' must be at least 'n' (3)."
NEEDS = "'use_beam_search' needs two beams or more: give 'best_of' or 'n'."


def with_beams(name, allowed):
    return f"With 'use_beam_search', '{name}' must be {allowed}."


REFUSED = [
    # fields, param, code, message
    ({"best_of": 0}, "best_of", "invalid_value", None),
    ({"best_of": -1}, "best_of", "invalid_value", None),
    ({"best_of": 1.5}, "best_of", "invalid_type", None),
    ({"best_of": True}, "best_of", "invalid_type", None),
    ({"best_of": "2"}, "best_of", "invalid_type", None),
    ({"best_of": 129}, "best_of", "invalid_value", "'best_of' must be at most 128."),
    ({"best_of": 10**30}, "best_of", "invalid_value", "'best_of' must be at most 128."),
    ({"best_of": 2, "n": 3}, "best_of", "invalid_value", BEST),
    (
        {"best_of": 3, "n": 2, "stream": True},
        "best_of",
        "invalid_value",
        "With 'stream', 'best_of' must equal 'n': the best is known at the end.",
    ),
    ({"use_beam_search": 1}, "use_beam_search", "invalid_type", None),
    ({"use_beam_search": True}, "best_of", "invalid_value", NEEDS),
    ({"use_beam_search": True, "best_of": 1}, "best_of", "invalid_value", NEEDS),
    ({**BEAM, "n": 3, "best_of": 2}, "best_of", "invalid_value", BEST),
    (
        {**BEAM, "stream": True},
        "stream",
        "invalid_value",
        with_beams("stream", "false: the best beam is known at the end"),
    ),
    ({**BEAM, "temperature": 0.1}, "temperature", "invalid_value", with_beams("temperature", "0")),
    ({**BEAM, "temperature": 1}, "temperature", "invalid_value", with_beams("temperature", "0")),
    ({**BEAM, "top_p": 0.9}, "top_p", "invalid_value", with_beams("top_p", "1")),
    ({**BEAM, "top_k": 5}, "top_k", "invalid_value", with_beams("top_k", "-1 or 0")),
    ({**BEAM, "min_p": 0.1}, "min_p", "invalid_value", with_beams("min_p", "0")),
    (
        {**BEAM, "presence_penalty": 1},
        "presence_penalty",
        "invalid_value",
        with_beams("presence_penalty", "0"),
    ),
    (
        {**BEAM, "frequency_penalty": -1},
        "frequency_penalty",
        "invalid_value",
        with_beams("frequency_penalty", "0"),
    ),
    (
        {**BEAM, "repetition_penalty": 1.1},
        "repetition_penalty",
        "invalid_value",
        with_beams("repetition_penalty", "1"),
    ),
    ({**BEAM, "length_penalty": 10.5}, "length_penalty", "invalid_value", None),
    ({**BEAM, "length_penalty": "1"}, "length_penalty", "invalid_type", None),
    ({**BEAM, "early_stopping": "never"}, "early_stopping", "invalid_type", None),
    (
        {"length_penalty": 0.8},
        "length_penalty",
        "invalid_value",
        "'length_penalty' needs 'use_beam_search' to be true.",
    ),
    (
        {"early_stopping": True, "use_beam_search": False},
        "early_stopping",
        "invalid_value",
        "'early_stopping' needs 'use_beam_search' to be true.",
    ),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("fields", "param", "code", "message"), REFUSED)
async def test_what_is_refused(refused, fleet, path, fields, param, code, message):
    await refused(path, fields, param, code, message)
    assert fleet.transport.sent == []


@pytest.mark.parametrize("prompts", [["a"] * 65, ["a"] * 33])
async def test_prompts_times_best_of_are_limited(fleet, prompts):
    best_of = 128 // len(prompts) + 1
    async with fleet.client() as client:
        body = {"model": "tiny", "prompt": prompts, "best_of": best_of, "n": 1}
        response = await client.post(TEXT, json=body)
        fits = await client.post(TEXT, json={**body, "prompt": prompts[: 128 // best_of]})
    assert response.json()["error"] == {
        "message": "At most 128 answers per request (prompts times n or best_of).",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "invalid_value",
    }
    assert fits.status_code == 200


NEW = ("best_of", "use_beam_search", "length_penalty", "early_stopping")


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({}, {"n": 1, "temperature": 1.0}),
        ({"n": 3, "best_of": 3}, {"n": 3, "temperature": 1.0}),
        ({"n": 3, "best_of": 3, "stream": True}, {"n": 3, "temperature": 1.0}),
        ({"best_of": None, "use_beam_search": False}, {"n": 1, "temperature": 1.0}),
        ({"length_penalty": 1.0, "early_stopping": False}, {"n": 1, "temperature": 1.0}),
        ({"n": 2, "best_of": 5, "temperature": 0.5}, {"n": 2, "best_of": 5, "temperature": 0.5}),
        (
            {"use_beam_search": True, "n": 2},
            {
                "n": 2,
                "temperature": 0.0,
                "use_beam_search": True,
                "length_penalty": 1.0,
                "early_stopping": False,
            },
        ),
        (
            {
                "use_beam_search": True,
                "best_of": 4,
                "length_penalty": -2,
                "early_stopping": True,
                "temperature": 0,
                "top_p": 1,
                "top_k": -1,
                "seed": 4,
            },
            {
                "n": 1,
                "best_of": 4,
                "temperature": 0.0,
                "use_beam_search": True,
                "length_penalty": -2.0,
                "early_stopping": True,
            },
        ),
    ],
)
async def test_what_replicas_are_asked(fleet, chat_body, path, fields, sent):
    body = chat_body if path == CHAT else {"model": "tiny", "prompt": "hi"}
    async with fleet.client() as client:
        assert (await client.post(path, json={**body, **fields})).status_code == 200
    sampling = fleet.transport.sent[0][1]["sampling"]
    assert {k: v for k, v in sampling.items() if k in ("n", "temperature", *NEW)} == sent


async def test_only_the_best_are_answers(fleet):
    async with fleet.client() as client:
        body = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "best_of": 5}
        answer = (await client.post(TEXT, json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in answer["choices"]} == {"Hello there!"}


async def test_every_drawn_choice_is_reserved_and_counted(make_fleet, make_play):
    fleet = make_fleet(replicas=1, max_inflight=5)
    fleet.transport.play = lambda *_: make_play(hangs=True, at=0)
    body = {"model": "tiny", "prompt": [5] * 40, "n": 2, "best_of": 5}
    async with fleet.client() as client:
        asking = asyncio.create_task(client.post(TEXT, json=body))
        await fleet.transport.hanging.wait()
        assert fleet.placement.stats()["r0"] == {
            "queued_requests": 0,
            "running_requests": 1,
            "queued_tokens": 0,
            "running_tokens": 200,
            "in_flight_prompts": 1,
            "choices": 5,
        }
        assert fleet.metric("warmroute_replica_choices", replica="r0") == 5
        assert fleet.metric("warmroute_replica_inflight", replica="r0") == 1
        full = await client.post(TEXT, json={"model": "tiny", "prompt": "a"})
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        asking.cancel()
        await asyncio.wait({asking})
    await fleet.settled()
    assert fleet.metric("warmroute_replica_choices", replica="r0") == 0


async def test_an_older_replica_refuses_what_it_does_not_know(fleet, make_play):
    told = "unknown sampling parameter 'best_of'"
    fleet.transport.play = lambda *_: make_play(error=("invalid", told))
    async with fleet.client() as client:
        response = await client.post(TEXT, json={"model": "tiny", "prompt": "a", "best_of": 2})
    assert (response.status_code, response.json()["error"]["message"]) == (400, told)
    await fleet.settled()
