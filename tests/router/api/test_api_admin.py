"""The administration: who may, what is understood, what replicas are told, what the caller hears."""

import asyncio
import hashlib
import json

import numpy as np
import pytest

from router.errors import ReplicaLost, UpstreamError

CLEAR, EXPLAIN = "/admin/cache/clear", "/admin/cache/explain"
ROOT = {"authorization": "Bearer root"}
MESSAGES = [{"role": "user", "content": "hi"}]
NOBODY = {"tenant": None, "salt": None, "adapter": None}


def digest(key):
    return hashlib.sha256(key.encode()).hexdigest()


def cleared(name, count=7, held=0):
    return {"v": 1, "replica": name, "cleared": count, "held": held}


def explained(name, **more):
    facts = {"num_tokens": 2, "hit_tokens": 0, "reason": "unseen", "evicted_s_ago": None}
    return {"v": 1, "replica": name, **facts, **more}


@pytest.fixture
def fleet(make_fleet):
    """Two replicas that clear and explain as they should, and an admin key."""
    found = make_fleet(admin_key=digest("root"), api_keys={digest("sk-a"): "acme"})
    found.transport.answers = {name: {**cleared(name), **explained(name)} for name in found.names}
    return found


async def post(fleet, path, body, headers=ROOT, **options):
    async with fleet.client() as client:
        if isinstance(body, bytes):
            options["content"] = body
        else:
            options["json"] = body
        return await client.post(path, headers=headers, **options)


async def get(fleet, query, headers=ROOT):
    async with fleet.client() as client:
        return await client.get(f"{EXPLAIN}?{query}", headers=headers)


def told(fleet):
    return [request for _, _, request in fleet.transport.orders]


# Who may


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer root"}, {"authorization": "Bearer sk-a"}])
async def test_without_an_admin_key_there_is_no_administration(make_fleet, headers):
    fleet = make_fleet(api_keys={digest("sk-a"): "acme"})
    answers = [
        await post(fleet, CLEAR, {"all": True}, headers),
        await get(fleet, "prompt=hi", headers),
        await post(fleet, EXPLAIN, {"prompt": "hi"}, headers),
    ]
    for answer in answers:
        assert (answer.status_code, answer.json()) == (
            404,
            {
                "error": {
                    "message": "The administration endpoints are off. To turn them on, set `admin_key` in "
                    "serve.yaml to the SHA-256 of a key.",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": "admin_disabled",
                }
            },
        )
    assert fleet.transport.orders == []


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "You didn't provide an admin key: send it as `Authorization: Bearer YOUR_KEY`."),
        (
            {"authorization": "Basic root"},
            "You didn't provide an admin key: send it as `Authorization: Bearer YOUR_KEY`.",
        ),
        ({"authorization": "Bearer sk-a"}, "Incorrect admin key provided."),
        ({"authorization": "Bearer rooT"}, "Incorrect admin key provided."),
        ({"authorization": f"Bearer {digest('root')}"}, "Incorrect admin key provided."),
        ({"authorization": b"Bearer \xff\xfe"}, "Incorrect admin key provided."),
    ],
)
async def test_other_keys_are_refused_before_anything_is_read(fleet, headers, message):
    answers = [
        await post(fleet, CLEAR, b"not json", headers),
        await get(fleet, "nonsense", headers),
        await post(fleet, EXPLAIN, b"not json", headers),
    ]
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["message"]) == (401, "invalid_api_key", message)
        assert answer.headers["www-authenticate"] == "Bearer"
    assert fleet.transport.orders == []


async def test_the_admin_key_is_no_api_key(fleet, chat_body):
    assert (await post(fleet, "/v1/chat/completions", chat_body)).status_code == 401


async def test_other_methods(fleet):
    async with fleet.client() as client:
        wrong = await client.get(CLEAR, headers=ROOT)
        other = await client.delete(EXPLAIN, headers=ROOT)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert (other.status_code, set(other.headers["allow"].split(", "))) == (405, {"GET", "HEAD", "POST"})
    assert fleet.transport.orders == []


# Clear


@pytest.mark.parametrize(
    ("body", "namespace"),
    [
        ({"all": True}, None),
        ({"all": True, "namespace": None}, None),
        ({"namespace": {"tenant": "acme"}}, {**NOBODY, "tenant": "acme"}),
        ({"namespace": {"tenant": "acme", "salt": "pepper"}}, {**NOBODY, "tenant": "acme", "salt": "pepper"}),
        ({"namespace": {"salt": "pepper"}, "all": False}, {**NOBODY, "salt": "pepper"}),
        ({"namespace": {"tenant": None}}, NOBODY),
    ],
)
async def test_what_is_cleared(fleet, body, namespace):
    answer = await post(fleet, CLEAR, body)
    assert (answer.status_code, answer.json()) == (
        200,
        {
            "object": "cache.clear",
            "replicas": [
                {"replica": "r0", "cleared": 7, "held": 0},
                {"replica": "r1", "cleared": 7, "held": 0},
            ],
        },
    )
    assert [(method, name) for method, name, _ in fleet.transport.orders] == [
        ("clear_cache", "r0"),
        ("clear_cache", "r1"),
    ]
    assert told(fleet) == [{"v": 1, "namespace": namespace}] * 2


async def test_some_replicas_only(fleet):
    answer = await post(fleet, CLEAR, {"all": True, "replicas": ["r1", "r1"]})
    assert [entry["replica"] for entry in answer.json()["replicas"]] == ["r1"]
    assert [name for _, name, _ in fleet.transport.orders] == ["r1"]


WRONG_CLEARS = [
    # body, status, param, code
    ({}, 400, "all", "missing_required_parameter"),
    ({"all": False}, 400, "all", "missing_required_parameter"),
    ({"all": None}, 400, "all", "missing_required_parameter"),
    ({"replicas": ["r0"]}, 400, "all", "missing_required_parameter"),
    ({"all": 1}, 400, "all", "invalid_type"),
    ({"all": "true"}, 400, "all", "invalid_type"),
    ({"all": True, "namespace": {"tenant": "acme"}}, 400, "namespace", "invalid_value"),
    ({"namespace": {}}, 400, "namespace", "invalid_value"),
    ({"namespace": "acme"}, 400, "namespace", "invalid_type"),
    ({"namespace": ["acme"]}, 400, "namespace", "invalid_type"),
    ({"namespace": {"tenant": 5}}, 400, "namespace.tenant", "invalid_type"),
    ({"namespace": {"salt": 5}}, 400, "namespace.salt", "invalid_type"),
    ({"namespace": {"salt": ""}}, 400, "namespace.salt", "invalid_value"),
    ({"namespace": {"salt": "s" * 257}}, 400, "namespace.salt", "invalid_value"),
    ({"namespace": {"tenant": "acme", "sesame": "x"}}, 400, "namespace", "unknown_parameter"),
    ({"all": True, "sesame": {}}, 400, None, "unknown_parameter"),
    ({"all": True, "replicas": []}, 400, "replicas", "invalid_value"),
    ({"all": True, "replicas": "r0"}, 400, "replicas", "invalid_type"),
    ({"all": True, "replicas": [0]}, 400, "replicas[0]", "invalid_type"),
    ({"all": True, "replicas": ["r0"] * 4097}, 400, "replicas", "invalid_value"),
    ({"all": True, "replicas": ["r0", "sesame"]}, 404, "replicas", "replica_not_found"),
    (b"", 400, None, "invalid_json"),
    (b"[]", 400, None, "invalid_json"),
    (b'{"all": true', 400, None, "invalid_json"),
    (b'{"namespace": {"salt": "\\ud800"}}', 400, None, "invalid_unicode"),
    (b"[" * 100_000, 400, None, "invalid_json"),
    (b" " * 3000, 413, None, "request_too_large"),
]


@pytest.mark.parametrize(("body", "status", "param", "code"), WRONG_CLEARS)
async def test_clears_that_are_refused(make_fleet, body, status, param, code):
    limit = 2000 if body == b" " * 3000 else 2 << 20
    fleet = make_fleet(admin_key=digest("root"), max_body_bytes=limit)
    answer = await post(fleet, CLEAR, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error
    assert "sesame" not in answer.text
    assert fleet.transport.orders == []


# Explain


async def test_explained_by_query(fleet, tokens_of):
    fleet.transport.answers["r1"] = explained("r1", hit_tokens=1, reason="evicted", evicted_s_ago=2.5)
    answer = await get(fleet, "prompt=h%C3%BC&tenant=acme&salt=pe+pper")
    facts = {"num_tokens": 2, "hit_tokens": 0, "reason": "unseen", "evicted_s_ago": None}
    assert (answer.status_code, answer.json()) == (
        200,
        {
            "object": "cache.explain",
            "num_tokens": 3,
            "replicas": [
                {"replica": "r0", **facts},
                {"replica": "r1", **facts, "hit_tokens": 1, "reason": "evicted", "evicted_s_ago": 2.5},
            ],
        },
    )
    namespace = {**NOBODY, "tenant": "acme", "salt": "pe pper"}
    assert [(method, request["namespace"]) for method, _, request in fleet.transport.orders] == [
        ("explain", namespace)
    ] * 2
    assert told(fleet)[0].keys() == {"v", "tokens", "namespace"}
    assert tokens_of(told(fleet)[0]["tokens"]) == fleet.codec.encode_text("hü").tolist()


async def test_explained_by_token_ids(fleet, tokens_of):
    query = await get(fleet, "tokens=5,%207,258&replica=r1")
    body = await post(fleet, EXPLAIN, {"tokens": [5, 7, 258], "replica": "r1", "model": "tiny"})
    assert query.json() == body.json()
    assert [name for _, name, _ in fleet.transport.orders] == ["r1", "r1"]
    assert (
        told(fleet) == [{"v": 1, "tokens": np.array([5, 7, 258], "<i4").tobytes(), "namespace": NOBODY}] * 2
    )


async def test_a_prompt_is_explained_as_the_completion_has_it(fleet, chat_body):
    chat = {"messages": chat_body["messages"], "chat_template_kwargs": {}}
    tenant = {"authorization": "Bearer sk-a"}
    for body, path in ((chat, "/v1/chat/completions"), ({"prompt": "Grüße"}, "/v1/completions")):
        await post(fleet, path, {"model": "tiny", **body}, tenant)
        answer = await post(fleet, EXPLAIN, {**body, "tenant": "acme", "replica": "r0"})
        assert answer.status_code == 200, answer.text
        sent, asked = fleet.transport.sent[-1][1], told(fleet)[-1]
        assert (asked["tokens"], asked["namespace"]) == (sent["tokens"], sent["namespace"])


WRONG_QUERIES = [
    # query, status, param, code
    ("", 400, "prompt", "missing_required_parameter"),
    ("tenant=acme", 400, "prompt", "missing_required_parameter"),
    ("prompt=", 400, "prompt", "empty_prompt"),
    ("prompt=a&tokens=5", 400, "prompt", "missing_required_parameter"),
    ("prompt=a&prompt=b", 400, None, "invalid_query"),
    ("prompt=%ff", 400, None, "invalid_query"),
    ("prompt=a" + "&x=1" * 16, 400, None, "invalid_query"),
    ("prompt=a&sesame=1", 400, None, "unknown_parameter"),
    ("prompt=a&salt=", 400, "salt", "invalid_value"),
    ("prompt=a&model=gpt-4", 404, "model", "model_not_found"),
    ("prompt=a&replica=sesame", 404, "replica", "replica_not_found"),
    ("prompt=a&add_generation_prompt=true", 400, "add_generation_prompt", "invalid_type"),
    ("prompt=" + "a" * 4096, 400, "prompt", "context_length_exceeded"),
    ("messages=[]", 400, "messages", "invalid_value"),
    ("tokens=", 400, "tokens", "invalid_value"),
    ("tokens=5,", 400, "tokens", "invalid_value"),
    ("tokens=5,a", 400, "tokens", "invalid_value"),
    ("tokens=-1", 400, "tokens", "invalid_value"),
    ("tokens=1.5", 400, "tokens", "invalid_value"),
    ("tokens=%D9%A3", 400, "tokens", "invalid_value"),  # an Arabic digit
    ("tokens=259", 400, "tokens", "invalid_value"),
    ("tokens=" + "9" * 5000, 400, "tokens", "invalid_value"),
    ("tokens=" + ",".join(["5"] * 4096), 400, "tokens", "context_length_exceeded"),
]


@pytest.mark.parametrize(("query", "status", "param", "code"), WRONG_QUERIES)
async def test_queries_that_are_refused(fleet, query, status, param, code):
    answer = await get(fleet, query)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error
    assert "sesame" not in answer.text
    assert fleet.transport.orders == []


WRONG_EXPLAINS = [
    ({}, 400, "prompt", "missing_required_parameter"),
    ({"prompt": "a", "messages": MESSAGES}, 400, "prompt", "missing_required_parameter"),
    ({"prompt": ["a"]}, 400, "prompt", "invalid_type"),
    ({"prompt": ""}, 400, "prompt", "empty_prompt"),
    ({"prompt": "a" * 5000}, 400, "prompt", "context_length_exceeded"),
    ({"tokens": []}, 400, "tokens", "empty_prompt"),
    ({"tokens": "5,6"}, 400, "tokens", "invalid_type"),
    ({"tokens": [True]}, 400, "tokens[0]", "invalid_type"),
    ({"tokens": [10**30]}, 400, "tokens", "invalid_value"),
    ({"tokens": [259]}, 400, "tokens", "invalid_value"),
    ({"messages": []}, 400, "messages", "empty_array"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role", "invalid_value"),
    ({"messages": MESSAGES, "tools": [1]}, 400, "tools[0]", "invalid_type"),
    ({"prompt": "a", "tenant": 1}, 400, "tenant", "invalid_type"),
    ({"prompt": "a", "salt": ["sesame"]}, 400, "salt", "invalid_type"),
    ({"prompt": "a", "namespace": {"tenant": "acme"}}, 400, None, "unknown_parameter"),
    ({"prompt": "a", "cache_salt": "sesame"}, 400, None, "unknown_parameter"),
    ({"prompt": "a", "replica": "sesame"}, 404, "replica", "replica_not_found"),
    (b"[]", 400, None, "invalid_json"),
]


@pytest.mark.parametrize(("body", "status", "param", "code"), WRONG_EXPLAINS)
async def test_explains_that_are_refused(fleet, body, status, param, code):
    answer = await post(fleet, EXPLAIN, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error
    assert "sesame" not in answer.text
    assert fleet.transport.orders == []


async def test_long_prompts_are_explained_in_a_thread(make_fleet):
    fleet = make_fleet(admin_key=digest("root"), inline_bytes=10)
    fleet.transport.answers = {name: explained(name) for name in fleet.names}
    assert (await post(fleet, EXPLAIN, {"prompt": "ab" * 500})).json()["num_tokens"] == 1000
    assert (await get(fleet, "prompt=" + "ab" * 500)).json()["num_tokens"] == 1000


# Replicas that fail


FAULTS = [
    # what r1 answers, the error the caller hears
    (None, ("unavailable", "no answer in time")),
    (ReplicaLost("r1", "the replica's process died"), ("unavailable", "the replica's process died")),
    (
        UpstreamError("AttributeError: no explain", "internal", "r1"),
        ("internal", "AttributeError: no explain"),
    ),
    (
        {"v": 1, "replica": "r1", "error": {"type": "error", "code": "invalid", "message": "bad namespace"}},
        ("invalid", "bad namespace"),
    ),
    ({"v": 1, "replica": "r1"}, ("internal", "replica r1 sent a malformed answer")),
    (
        {**explained("r1"), **cleared("r1", held=-1), "hit_tokens": -1},
        ("internal", "replica r1 sent a malformed answer"),
    ),
    (
        {**explained("r1"), **cleared("r1", held=True), "reason": 5},
        ("internal", "replica r1 sent a malformed answer"),
    ),
    ("yes", ("internal", "replica r1 sent something that is no answer")),
]


@pytest.mark.parametrize(("fault", "error"), FAULTS)
@pytest.mark.parametrize(("path", "body"), [(CLEAR, {"all": True}), (EXPLAIN, {"prompt": "hi"})])
async def test_one_replica_fails(fleet, fault, error, path, body):
    fleet.transport.answers["r1"] = fault
    answer = await post(fleet, path, body)
    good, bad = answer.json()["replicas"]
    assert answer.status_code == 207
    assert (good["replica"], "error" in good) == ("r0", False)
    assert bad == {"replica": "r1", "error": {"code": error[0], "message": error[1]}}
    alone = await post(
        fleet, path, {**body, **({"replicas": ["r1"]} if path == CLEAR else {"replica": "r1"})}
    )
    assert (alone.status_code, alone.json()["replicas"]) == (502, [bad])


async def test_an_answer_may_lack_what_not_every_version_tells(fleet):
    fleet.transport.answers = {"r0": {"v": 1, "replica": "r0", "held": 3}, "r1": cleared("r1", 1, 2)}
    assert (await post(fleet, CLEAR, {"all": True})).json()["replicas"] == [
        {"replica": "r0", "held": 3},
        {"replica": "r1", "cleared": 1, "held": 2},
    ]


async def test_a_call_that_is_cancelled_from_below_is_a_failed_one(fleet, monkeypatch):
    async def cancelled(*_):
        raise asyncio.CancelledError

    monkeypatch.setattr(fleet.transport, "clear_cache", cancelled)
    answer = await post(fleet, CLEAR, {"all": True})
    assert answer.status_code == 502
    assert answer.json()["replicas"][0]["error"] == {
        "code": "unavailable",
        "message": "the call was cancelled",
    }


async def test_what_nobody_expected_is_a_clean_500(fleet):
    fleet.transport.answers["r1"] = ZeroDivisionError("secret detail")
    answer = await post(fleet, CLEAR, {"all": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "secret detail" not in answer.text


@pytest.mark.parametrize("path", [CLEAR, EXPLAIN])
async def test_no_replica(make_fleet, path):
    fleet = make_fleet(replicas=0, admin_key=digest("root"))
    answer = await post(fleet, path, {"all": True} if path == CLEAR else {"prompt": "hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")


async def test_silent_replicas_are_asked_all_at_once(make_fleet):
    fleet = make_fleet(replicas=50, admin_key=digest("root"))
    fleet.transport.answers = dict.fromkeys(fleet.names)
    answering = asyncio.create_task(post(fleet, CLEAR, {"all": True}))
    await fleet.transport.hanging.wait()
    await asyncio.sleep(0)
    assert len(fleet.transport.orders) == 50
    answer = await answering
    assert (answer.status_code, len(answer.json()["replicas"])) == (502, 50)


async def test_neither_logs_nor_metrics_nor_answers_have_salts(fleet, caplog):
    caplog.set_level("WARNING", "httpx")  # the client, not the server
    caplog.set_level("DEBUG")
    fleet.transport.answers["r1"] = UpstreamError("failed", "internal", "r1")
    answers = [
        await post(fleet, CLEAR, {"namespace": {"tenant": "acme", "salt": "pepper"}}),
        await post(fleet, EXPLAIN, {"prompt": "my diary", "salt": "pepper"}),
        await get(fleet, "prompt=my+diary&salt=pepper&tenant=acme"),
        await get(fleet, "prompt=my+diary&salt=pepper&pepper=1"),
    ]
    assert [answer.status_code for answer in answers] == [207, 207, 207, 400]
    text = caplog.text + fleet.app_metrics() + "".join(answer.text for answer in answers)
    assert not any(secret in text for secret in ("pepper", "diary", "acme", "Bearer"))
    assert "cleared one namespace: 1 of 2 replicas did" in caplog.text
    assert fleet.metric("warmroute_requests_total", endpoint=CLEAR, status="207") == 1
    assert fleet.metric("warmroute_requests_total", endpoint=EXPLAIN, status="207") == 2


@pytest.mark.parametrize("path", [CLEAR, EXPLAIN])
async def test_a_client_that_leaves_while_sending(fleet, make_call, path):
    call = make_call(fleet.app, path, b"", ROOT)
    call._incoming.get_nowait()
    call.leave()
    await call.task
    assert (call.sent[0]["status"], fleet.transport.orders) == (499, [])
    assert json.loads(call.body)["error"]["code"] == "client_closed_request"
