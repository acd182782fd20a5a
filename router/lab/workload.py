"""The built-in workload: what a shared endpoint sees in a minute, synthesized and deterministic by seed.

Five kinds of traffic, in the shapes of the field:

- tenants, each with a long system prompt of its own, and several multi-turn chats per tenant;
- an agent loop: tool schemas in the system prompt, then a history of tool calls and results that only grows;
- documents, each asked different questions by different people;
- random prompts that share nothing with anything.

Histories are scripted: an answer in a later turn is the workload's, not the model's, so that the same prompts
reach every policy. Tools are rendered into the system prompt, and tool results come back as user messages,
because chat templates of small models ignore `tools` and know no tool role. Sessions overlap: every turn has
a virtual time, and the workload is sorted by it, so it can be replayed closed loop or on that clock.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from router.lab.prose import Prose
from router.lab.record import Json, Request

_COMPANIES = (
    "Alder Bank",
    "Borealis Air",
    "Cedar Health",
    "Dunmore Energy",
    "Eastgate Books",
    "Fairview Hotels",
)
_TOOLS = ("search_orders", "read_file", "update_ticket", "list_invoices", "send_message", "lookup_customer")


@dataclass(frozen=True)
class WorkloadConfig:
    """How much of each kind of traffic; lengths are in tokens, times in seconds."""

    seed: int = 0
    tenants: int = 3
    system_tokens: tuple[int, int] = (620, 1480)  # of the first and the last tenant, evenly between
    chats: int = 3  # per tenant
    turns: int = 5  # per chat
    question_tokens: int = 20
    answer_tokens: int = 42
    agents: int = 2
    agent_steps: int = 10
    agent_tools: int = 6
    agent_tokens: int = 900  # of the system prompt with the tools
    result_tokens: int = 50
    documents: int = 2
    document_tokens: int = 900
    questions: int = 9  # per document
    random_prompts: int = 8
    random_tokens: int = 100
    max_tokens: tuple[int, int] = (6, 8)  # bounds of an answer's length, drawn evenly
    duration_s: float = 60.0


TINY = WorkloadConfig(
    tenants=2, system_tokens=(60, 90), chats=1, turns=2,
    agents=1, agent_steps=2, agent_tools=1, agent_tokens=100,
    documents=1, document_tokens=60, questions=2,
    random_prompts=2, random_tokens=20,
    max_tokens=(2, 4), duration_s=1.0,
)  # fmt: skip
"""A dozen short prompts, for tests and for trying an endpoint out."""


def builtin_workload(config: WorkloadConfig | None = None) -> list[Request]:
    """The requests of the built-in workload in the order of their virtual time, with `timestamp_s` set."""
    config = config or WorkloadConfig()
    rng = random.Random(f"warmroute workload {config.seed}")
    prose = Prose(rng)
    timed = [
        replace(request, max_tokens=rng.randint(*config.max_tokens))
        for kind in (_chats, _agents, _documents, _random_prompts)
        for request in kind(config, prose)
    ]
    return sorted(timed, key=lambda request: request.timestamp_s or 0.0)


def _chats(config: WorkloadConfig, prose: Prose) -> Iterator[Request]:
    """Multi-turn chats: all chats of a tenant share its system prompt."""
    low, high = config.system_tokens
    for tenant in range(config.tenants):
        share = tenant / max(1, config.tenants - 1)
        system = _system_prompt(_company(tenant), low + (high - low) * share, prose)
        for chat in range(config.chats):
            turns = [
                (
                    prose.text(config.question_tokens - 17) + " " + prose.question(),
                    prose.text(config.answer_tokens),
                )
                for _ in range(config.turns)
            ]
            yield from _session(f"chat-{tenant}-{chat}", system, turns, config, prose.rng)


def _agents(config: WorkloadConfig, prose: Prose) -> Iterator[Request]:
    """Agent loops: one set of tools for all, a task each, and a history of calls and results."""
    system = _agent_prompt(config, prose)
    for agent in range(config.agents):
        results = ["Your task: " + prose.text(2 * config.question_tokens)]
        results += [_tool_result(config.result_tokens, prose) for _ in range(config.agent_steps - 1)]
        steps = [(result, _tool_call(prose)) for result in results]
        yield from _session(f"agent-{agent}", system, steps, config, prose.rng)


def _documents(config: WorkloadConfig, prose: Prose) -> Iterator[Request]:
    """Documents with different questions, each a request of its own."""
    for number in range(config.documents):
        document = f"Report {number + 1}: the {prose.noun()}\n\n" + _sections(
            config.document_tokens - 25, prose
        )
        for _ in range(config.questions):
            messages = (
                {"role": "system", "content": "Answer from the document only."},
                {"role": "user", "content": f"{document}\n\nQuestion: {prose.question()}"},
            )
            yield Request(messages=messages, timestamp_s=prose.rng.uniform(0, config.duration_s))


def _random_prompts(config: WorkloadConfig, prose: Prose) -> Iterator[Request]:
    for _ in range(config.random_prompts):
        message = {"role": "user", "content": prose.scramble(config.random_tokens)}
        yield Request(messages=(message,), timestamp_s=prose.rng.uniform(0, config.duration_s))


def _session(
    name: str, system: str, turns: list[tuple[str, str]], config: WorkloadConfig, rng: random.Random
) -> Iterator[Request]:
    """One request per (what the user says, the scripted answer); each carries all turns before it."""
    gap = config.duration_s / (2 * len(turns))
    now = rng.uniform(0, config.duration_s / 2)
    messages: list[Json] = [{"role": "system", "content": system}]
    for said, answer in turns:
        messages.append({"role": "user", "content": said})
        yield Request(messages=tuple(messages), timestamp_s=now, session_id=name)
        messages.append({"role": "assistant", "content": answer})
        now += rng.uniform(0.5, 1.0) * gap


def _company(tenant: int) -> str:
    name = _COMPANIES[tenant % len(_COMPANIES)]
    return name if tenant < len(_COMPANIES) else f"{name} {tenant // len(_COMPANIES) + 1}"


def _system_prompt(company: str, tokens: float, prose: Prose) -> str:
    opening = f"You are the assistant of {company}. Be brief and polite, and follow the rules below.\n\n"
    return opening + _sections(tokens - 25, prose)


def _sections(tokens: float, prose: Prose) -> str:
    """Numbered sections of about 150 tokens each."""
    count = max(1, round(tokens / 150))
    return "\n\n".join(
        f"## {number}. On the {prose.noun()}\n{prose.text(tokens / count - 10)}"
        for number in range(1, count + 1)
    )


def _agent_prompt(config: WorkloadConfig, prose: Prose) -> str:
    """Tool schemas as JSON, each with a description that fills the aimed length."""
    opening = "You solve tasks by calling tools, one call at a time. You have these tools:\n"
    tools = _TOOLS[: config.agent_tools]
    per_tool = config.agent_tokens / len(tools) - 90
    return opening + "\n".join(json.dumps(_tool_schema(name, per_tool, prose)) for name in tools)


def _tool_schema(name: str, tokens: float, prose: Prose) -> Json:
    properties = {
        "query": {"type": "string", "description": f"What to look for, such as the {prose.noun()}."},
        "limit": {"type": "integer", "minimum": 1, "maximum": prose.rng.randrange(10, 100)},
    }
    parameters = {"type": "object", "properties": properties, "required": ["query"]}
    function = {"name": name, "description": prose.text(tokens), "parameters": parameters}
    return {"type": "function", "function": function}


def _tool_call(prose: Prose) -> str:
    arguments = {"query": prose.noun(), "limit": prose.rng.randrange(1, 10)}
    call = {"name": prose.rng.choice(_TOOLS), "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _tool_result(tokens: float, prose: Prose) -> str:
    result = {"status": "ok", "items": prose.rng.randrange(1, 20), "summary": prose.text(tokens - 25)}
    return f"<tool_response>\n{json.dumps(result)}\n</tool_response>"
