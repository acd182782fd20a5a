"""`cache_priority` and `cache_retention`: what replicas are told, and what is refused."""

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
OK = {"start": 0, "end": 16, "priority": 50}
FIRST, SECOND = "cache_retention[0]", "cache_retention[1]"


def at(start, end=None, **more):
    return {"start": start, "end": end, "priority": 1, **more}


REFUSED = [
    # fields, param, code, message
    ({"cache_priority": -1}, "cache_priority", "invalid_value", None),
    ({"cache_priority": 101}, "cache_priority", "invalid_value", None),
    ({"cache_priority": 5.0}, "cache_priority", "invalid_type", None),
    ({"cache_priority": True}, "cache_priority", "invalid_type", None),
    ({"cache_priority": "high"}, "cache_priority", "invalid_type", None),
    ({"cache_retention": OK}, "cache_retention", "invalid_type", None),
    ({"cache_retention": "all"}, "cache_retention", "invalid_type", None),
    ({"cache_retention": [5]}, FIRST, "invalid_type", None),
    ({"cache_retention": [None]}, FIRST, "invalid_type", None),
    ({"cache_retention": [{"end": 5, "priority": 1}]}, f"{FIRST}.start", "missing_required_parameter", None),
    ({"cache_retention": [OK, {"start": 20}]}, f"{SECOND}.priority", "missing_required_parameter", None),
    (
        {"cache_retention": [OK, {"start": 20, "priority": 101}]},
        f"{SECOND}.priority",
        "invalid_value",
        f"Invalid '{SECOND}.priority': Input should be less than or equal to 100.",
    ),
    ({"cache_retention": [{"start": 0, "priority": -1}]}, f"{FIRST}.priority", "invalid_value", None),
    ({"cache_retention": [{"start": 0, "priority": None}]}, f"{FIRST}.priority", "invalid_type", None),
    ({"cache_retention": [at(-1)]}, f"{FIRST}.start", "invalid_value", None),
    ({"cache_retention": [at("0")]}, f"{FIRST}.start", "invalid_type", None),
    ({"cache_retention": [at(1.0)]}, f"{FIRST}.start", "invalid_type", None),
    ({"cache_retention": [at(True)]}, f"{FIRST}.start", "invalid_type", None),
    ({"cache_retention": [at(2**63)]}, f"{FIRST}.start", "invalid_value", None),
    ({"cache_retention": [at(0, -5)]}, f"{FIRST}.end", "invalid_value", None),
    ({"cache_retention": [at(0, 2**70)]}, f"{FIRST}.end", "invalid_value", None),
    (
        {"cache_retention": [OK, at(20, 18)]},
        SECOND,
        "invalid_value",
        f"Invalid '{SECOND}': 'end' must be more than 'start'.",
    ),
    (
        {"cache_retention": [at(7, 7)]},
        FIRST,
        "invalid_value",
        f"Invalid '{FIRST}': 'end' must be more than 'start'.",
    ),
    ({"cache_retention": [at(0, duration_s=0)]}, f"{FIRST}.duration_s", "invalid_value", None),
    ({"cache_retention": [at(0, duration_s=-1.5)]}, f"{FIRST}.duration_s", "invalid_value", None),
    ({"cache_retention": [at(0, duration_s="1h")]}, f"{FIRST}.duration_s", "invalid_type", None),
    (
        {"cache_retention": [OK, at(16, sesame=1)]},
        SECOND,
        "unknown_parameter",
        f"There is an unknown field in '{SECOND}'.",
    ),
    (
        {"cache_retention": [OK, at(15)]},
        SECOND,
        "invalid_value",
        f"'{SECOND}' overlaps '{FIRST}'.",
    ),
    (
        {"cache_retention": [at(40), at(0, 8), at(50, 60)]},
        "cache_retention[2]",
        "invalid_value",
        f"'cache_retention[2]' overlaps '{FIRST}'.",
    ),
    (
        {"cache_retention": [at(8, 12), at(30, 31), at(0, 9)]},
        "cache_retention[2]",
        "invalid_value",
        f"'cache_retention[2]' overlaps '{FIRST}'.",
    ),
    ({"cache_retention": [at(3), at(3)]}, SECOND, "invalid_value", f"'{SECOND}' overlaps '{FIRST}'."),
    ({"cache_retention": [at(k, k + 1) for k in range(65)]}, "cache_retention", "invalid_value", None),
    (
        {"cache_retention": [OK], "cache_priority": 5},
        "cache_retention",
        "invalid_value",
        "Give either 'cache_priority' or 'cache_retention', not both.",
    ),
    ({"cache_retention": [at(3), at(3)], "no_cache": True}, SECOND, "invalid_value", None),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("fields", "param", "code", "message"), REFUSED)
async def test_what_is_refused(refused, fleet, path, fields, param, code, message):
    text = await refused(path, fields, param, code, message)
    assert "sesame" not in text
    assert fleet.transport.sent == []


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, {}),
        ({"cache_priority": None, "cache_retention": None}, {}),
        ({"cache_retention": []}, {}),
        ({"cache_priority": 0}, {"priority": 0}),
        ({"cache_priority": 100, "cache_retention": []}, {"priority": 100}),
        (
            {"cache_retention": [{"start": 16, "priority": 3, "duration_s": 5}, OK]},
            {
                "retention": [
                    {"start": 16, "end": None, "priority": 3, "duration_s": 5.0},
                    {"start": 0, "end": 16, "priority": 50, "duration_s": None},
                ]
            },
        ),
        (
            {"cache_retention": [at(k, k + 1) for k in range(64)]},
            {"retention": [at(k, k + 1, duration_s=None) for k in range(64)]},
        ),
    ],
)
async def test_what_replicas_are_told(fleet, chat_body, path, fields, told):
    body = chat_body if path == CHAT else {"model": "tiny", "prompt": ["hi", "ho"]}
    async with fleet.client() as client:
        assert (await client.post(path, json={**body, **fields})).status_code == 200
    assert [wire["cache"] for _, wire in fleet.transport.sent] == [
        {"read": True, "publish": True, **told}
    ] * len(fleet.transport.sent)


async def test_nothing_is_kept_of_what_is_not_cached(fleet):
    async with fleet.client() as client:
        body = {"model": "tiny", "prompt": "hi", "no_cache": True, "cache_priority": 9}
        assert (await client.post(TEXT, json=body)).status_code == 200
    assert fleet.transport.sent[0][1]["cache"] == {"read": False, "publish": False}
