"""Whatever the body, the answer is OpenAI-shaped and never a 500."""

import asyncio
import hashlib
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CLEAR, EXPLAIN = "/admin/cache/clear", "/admin/cache/explain"
PATHS = (CHAT, TEXT, "/tokenize", "/detokenize", CLEAR, EXPLAIN)

numbers = st.one_of(st.integers(-3, 5), st.integers(), st.floats(), st.booleans())
any_text = st.text(max_size=8) | st.text(st.characters(), max_size=3)  # the latter with lone surrogates
scalars = st.one_of(st.none(), numbers, any_text)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
part = st.fixed_dictionaries(
    {}, optional={"type": st.just("text") | values, "text": st.text(max_size=9) | values}
)
function = st.fixed_dictionaries(
    {"name": st.text(max_size=4)}, optional={"arguments": st.just('{"a": [1]}') | values}
)
call = st.fixed_dictionaries(
    {}, optional={"id": st.text(max_size=3), "type": values, "function": function | values}
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"])},
    optional={
        "content": st.text(max_size=9) | st.lists(part | values, max_size=2) | values,
        "name": values,
        "tool_calls": st.lists(call, max_size=2) | values,
        "tool_call_id": st.text(max_size=3) | values,
        "reasoning_content": values,
    },
)
good_message = st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=9)})
retention_range = st.fixed_dictionaries(
    {"start": st.integers(0, 9), "priority": st.integers(0, 100)},
    optional={"end": st.integers(-1, 20) | values, "duration_s": numbers, "x": values},
)
NAMES = """
max_tokens max_completion_tokens temperature top_p top_k min_p seed presence_penalty frequency_penalty
repetition_penalty top_logprobs min_tokens stop_token_ids cache_salt no_cache ignore_eos echo suffix
tool_choice response_format user logit_bias functions modalities add_generation_prompt
add_special_tokens metadata use_beam_search length_penalty early_stopping cache_priority all tenant salt
replica
"""
FIELDS = {
    "model": st.sampled_from(["tiny", "other"]) | values,
    "messages": st.lists(good_message, min_size=1, max_size=2)
    | st.lists(message | values, max_size=3)
    | values,
    "prompt": st.text(max_size=9)
    | st.lists(st.integers(-2, 300), max_size=4)
    | st.lists(st.text(max_size=3), max_size=3)
    | values,
    "tokens": st.lists(st.integers(-1, 260), max_size=4) | values,
    "stream": st.booleans() | values,
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}) | values,
    "tools": st.lists(st.dictionaries(st.text(max_size=3), values, max_size=2), max_size=2) | values,
    "chat_template_kwargs": st.dictionaries(st.text(max_size=5), values, max_size=2) | values,
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3) | values,
    "n": st.integers(1, 3) | values,
    "best_of": st.integers(1, 3) | values,
    "cache_retention": st.lists(retention_range | values, max_size=3) | values,
    "namespace": st.fixed_dictionaries({}, optional={"tenant": any_text, "salt": any_text}) | values,
    "replicas": st.lists(st.sampled_from(["r0", "r1", "r2"]), max_size=3) | values,
    "logprobs": st.booleans() | st.integers(0, 5) | values,
    **{name: values for name in NAMES.split()},
}
likely = {"model": st.just("tiny"), "messages": FIELDS["messages"], "prompt": FIELDS["prompt"]}
rest = {name: field for name, field in FIELDS.items() if name not in likely}
bodies = st.fixed_dictionaries(likely, optional=rest) | st.fixed_dictionaries({}, optional=FIELDS)
GOOD = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"model": "tiny", "prompt": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    CLEAR: {"all": True},
    EXPLAIN: {"prompt": "hi"},
}
ROOT = {"authorization": "Bearer root"}


@st.composite
def nearly_good(draw):
    """A good body with one or two fields replaced, so that every field's own checks are reached."""
    path = draw(st.sampled_from(PATHS))
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=2))
    return path, {**GOOD[path], **{name: draw(FIELDS[name]) for name in names}}


def check(response, path):
    """OpenAI's shape, and no 500."""
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        body = response.json()
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        response.json()


def post(fleet, path, content):
    async def run():
        async with fleet.client() as client:
            response = await client.post(
                path, content=content, headers=ROOT if path in (CLEAR, EXPLAIN) else {}
            )
        await fleet.settled()
        return response

    return asyncio.run(run())


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=nearly_good())
def test_one_or_two_strange_fields(make_fleet, case):
    path, body = case
    check(post(shared(make_fleet), path, json.dumps(body).encode()), path)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), body=bodies)
def test_any_object(make_fleet, path, body):
    check(post(shared(make_fleet), path, json.dumps(body).encode()), path)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    query=st.binary(max_size=30)
    | st.from_regex(r"(prompt|tokens|tenant|salt|replica)=[0-9,%&=a-f]*").map(str.encode)
)
def test_any_query(make_fleet, query):
    fleet = shared(make_fleet)

    async def run():
        found = []

        async def send(message):
            found.append(message)

        scope = {"type": "http", "method": "GET", "path": EXPLAIN, "query_string": query, "root_path": "",
                 "headers": [(b"authorization", b"Bearer root")], "client": ("127.0.0.1", 1)}  # fmt: skip
        await fleet.app(scope, None, send)
        return found

    start, body = asyncio.run(run())
    assert start["status"] in (200, 400, 404)
    assert ("error" in json.loads(body["body"])) == (start["status"] != 200)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(PATHS), content=st.binary(max_size=40) | values.map(lambda v: json.dumps(v).encode())
)
def test_any_bytes(make_fleet, path, content):
    check(post(shared(make_fleet), path, content), path)


_fleets = {}


def shared(make_fleet):
    """One fleet for all examples of this module: building one takes longer than a request."""
    if not _fleets:
        fleet = make_fleet(admin_key=hashlib.sha256(b"root").hexdigest())
        facts = {"num_tokens": 2, "hit_tokens": 0, "reason": "unseen", "held": 0}
        fleet.transport.answers = {name: {"v": 1, "replica": name, **facts} for name in fleet.names}
        _fleets[0] = fleet
    return _fleets[0]
