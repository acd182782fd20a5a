import hashlib
import json

import numpy as np

from router.lab.ideal import ideal_hits
from router.lab.workload import TINY, WorkloadConfig, builtin_workload


def as_text(request):
    return json.dumps(request.messages)


def digest(requests):
    facts = [(as_text(r), r.max_tokens, r.timestamp_s, r.session_id) for r in requests]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def ideal_share(requests):
    prompts = [np.frombuffer(as_text(r)[:-1].encode(), np.uint8).astype(np.int32) for r in requests]
    return sum(ideal_hits(prompts)) / sum(map(len, prompts))


def test_same_seed_same_workload_other_seed_another():
    assert digest(builtin_workload()) == digest(builtin_workload(WorkloadConfig(seed=0)))
    assert digest(builtin_workload()) != digest(builtin_workload(WorkloadConfig(seed=1)))


def test_workload_does_not_change_by_accident():
    """Figures in the README are of this workload; a change of it must be meant."""
    assert (
        digest(builtin_workload(TINY)) == "678373536875c0df7b3ec441a1ee7803c566d723cd32ee7b03c6053772fe875e"
    )


def test_default_holds_every_kind_of_traffic():
    requests = builtin_workload()
    sessions = [r.session_id for r in requests if r.session_id is not None]
    assert len(requests) == 91
    assert len([s for s in sessions if s.startswith("chat-")]) == 3 * 3 * 5
    assert len([s for s in sessions if s.startswith("agent-")]) == 2 * 10
    assert len(requests) - len(sessions) == 2 * 9 + 8
    assert {r.max_tokens for r in requests} == {6, 7, 8}


def test_ideal_hit_rate_is_that_of_a_shared_endpoint():
    for seed in range(3):
        assert 0.86 < ideal_share(builtin_workload(WorkloadConfig(seed=seed))) < 0.92


def test_system_prompts_span_the_aimed_lengths():
    systems = {
        r.messages[0]["content"] for r in builtin_workload() if (r.session_id or "").startswith("chat-")
    }
    lengths = sorted(len(system) for system in systems)
    assert len(lengths) == 3
    assert 600 * 4.5 < lengths[0] < 700 * 5.2
    assert 1400 * 4.5 < lengths[-1] < 1550 * 5.2


def test_turns_are_in_order_and_each_extends_the_one_before():
    latest = {}
    for request in builtin_workload():
        if request.session_id is not None:
            before = latest.get(request.session_id, ())
            assert request.messages[: len(before)] == before
            assert len(request.messages) == len(before) + 2
            latest[request.session_id] = request.messages


def test_roles_alternate_so_that_any_chat_template_accepts_them():
    for request in builtin_workload():
        roles = [message["role"] for message in request.messages]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert all(message["content"] for message in request.messages)


def test_times_rise_and_sessions_overlap():
    requests = builtin_workload()
    times = [r.timestamp_s for r in requests]
    assert times == sorted(times)
    assert times[0] >= 0 and times[-1] <= 60
    assert len({r.session_id for r in requests[:40]}) > 6


def test_agent_tools_are_json_schemas():
    agent = next(r for r in builtin_workload() if r.session_id == "agent-0")
    tools = [json.loads(line) for line in agent.messages[0]["content"].splitlines()[1:]]
    assert [tool["type"] for tool in tools] == ["function"] * 6
    assert len({tool["function"]["name"] for tool in tools}) == 6


def test_tiny_is_tiny():
    requests = builtin_workload(TINY)
    assert len(requests) == 10
    assert max(len(as_text(r)) for r in requests) < 2000
