"""Tenants by key; without keys, this machine only."""

import hashlib
import logging

import pytest

CHAT = "/v1/chat/completions"
KEYS = {
    hashlib.sha256(key.encode()).hexdigest(): tenant for key, tenant in [("sk-a", "acme"), ("sk-ü", "umlaut")]
}


@pytest.fixture
def closed(make_fleet):
    return make_fleet(api_keys=KEYS)


def bearer(key):
    return [(b"authorization", b"Bearer " + key.encode())]


@pytest.mark.parametrize(("key", "tenant"), [("sk-a", "acme"), ("sk-ü", "umlaut")])
async def test_a_key_names_its_tenant(closed, chat_body, key, tenant):
    async with closed.client("203.0.113.7") as client:
        response = await client.post(CHAT, json=chat_body, headers=bearer(key))
    assert response.status_code == 200
    assert closed.transport.sent[0][1]["namespace"]["tenant"] == tenant


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer("sk-b"),
        bearer(""),
        bearer(next(iter(KEYS))),
        [(b"authorization", b"Basic sk-a")],
        bearer("sk-\u2028"),
    ],
)
async def test_bad_keys(closed, chat_body, headers):
    async with closed.client() as client:
        responses = [
            await client.post(CHAT, json=chat_body, headers=headers),
            await client.post("/v1/completions", json={"model": "tiny", "prompt": "a"}, headers=headers),
            await client.get("/v1/models", headers=headers),
            await client.get("/v1/models/tiny", headers=headers),
            await client.post("/tokenize", json={"prompt": "a"}, headers=headers),
            await client.post("/detokenize", json={"tokens": [5]}, headers=headers),
        ]
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
    for response in responses:
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (
            401,
            "invalid_api_key",
            "invalid_request_error",
        )
        assert response.headers["www-authenticate"] == "Bearer"
    assert closed.transport.sent == []


async def test_the_scheme_has_any_case(closed, chat_body):
    async with closed.client() as client:
        response = await client.post(CHAT, json=chat_body, headers={"authorization": "bearer sk-a"})
    assert response.status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1"])
async def test_open_on_loopback(fleet, chat_body, host):
    async with fleet.client(host) as client:
        assert (await client.post(CHAT, json=chat_body)).status_code == 200
    assert fleet.transport.sent[0][1]["namespace"]["tenant"] is None


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "203.0.113.7", "2001:db8::1", "::ffff:10.0.0.1", "localhost", ""]
)
async def test_closed_to_others_without_keys(fleet, chat_body, host):
    async with fleet.client(host) as client:
        response = await client.post(CHAT, json=chat_body, headers=bearer("sk-any"))
        assert (await client.get("/health")).status_code == 200
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (403, "loopback_only", "permission_error")


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/completions"])
async def test_a_client_gone_before_anybody_looked_is_gone_not_forbidden(fleet, make_call, path):
    async def without_peer(scope, receive, send):  # what uvicorn says of a socket that is closed already
        await fleet.app({**scope, "client": None}, receive, send)

    call = make_call(without_peer, path, b"{}")
    await call.task
    assert fleet.metric("warmroute_requests_total", endpoint=path, status="499") == 1
    assert fleet.metric("warmroute_requests_total", endpoint=path, status="403") == 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-forwarded-for": "127.0.0.1"}, 200),
        ({"x-forwarded-for": "203.0.113.7, 127.0.0.1"}, 403),
        ({"x-forwarded-for": "127.0.0.1, 203.0.113.7"}, 403),
        ({"x-forwarded-for": "unknown"}, 403),
        ({"forwarded": "for=203.0.113.7"}, 403),
    ],
)
async def test_a_local_proxy_does_not_open_the_api(fleet, chat_body, headers, status):
    async with fleet.client() as client:
        assert (await client.post(CHAT, json=chat_body, headers=headers)).status_code == status


def test_one_warning_when_open(make_fleet, caplog):
    caplog.set_level(logging.WARNING, "router.api.auth")
    make_fleet(api_keys=KEYS)
    assert caplog.records == []
    make_fleet()
    assert [r.getMessage() for r in caplog.records] == [
        "no API keys are configured: the API is open to every client on this machine"
    ]


async def test_tenants_and_salts_never_share_hashes(closed, chat_body):
    hashes = set()
    async with closed.client() as client:
        for key in ("sk-a", "sk-ü"):
            for salt in (None, "acme", "umlaut"):
                await client.post(CHAT, json={**chat_body, "cache_salt": salt}, headers=bearer(key))
                hashes.add(closed.transport.sent[-1][1]["hashes"])
    assert len(hashes) == 6
