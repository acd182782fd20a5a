"""Chat rendering: what callers send always reaches the prompt, and what cannot be rendered says why."""

import json

import pytest

from replica.chat_template import ChatTemplate
from replica.errors import ChatTemplateError, RequestError
from replica.random_model import CHAT_TEMPLATE

PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "it's <b>", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def render(messages, source=PLAIN, **options):
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def test_roles_and_generation_prompt():
    messages = [{"role": r, "content": r[0]} for r in ("system", "user", "assistant", "tool", "developer")]
    assert render(messages) == "[system]s[user]u[assistant]a[tool]t[system]d>"
    assert render(HI, add_generation_prompt=False) == "[user]hi"


def test_a_longer_conversation_extends_the_shorter_one():
    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    template = ChatTemplate(CHAT_TEMPLATE, {})
    first = template.render(turns[:2])
    assert template.render(turns).startswith(first + "two<|im_end|>\n")


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert render([{"role": "user", "content": parts}]) == "[user]ab>"


def test_tools_the_template_ignores_are_written_into_the_system_message():
    assert render(HI, tools=[TOOL]) == (
        "[system]# Tools\nYou may call one or more of these functions. "
        'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.\n'
        f"<tools>\n{json.dumps(TOOL)}\n</tools>[user]hi>"
    )
    with_system = render([{"role": "system", "content": "S"}, *HI], tools=[TOOL])
    assert with_system.startswith("[system]S\n\n# Tools\n")
    other = {**TOOL, "function": {**TOOL["function"], "name": "g"}}
    assert render(HI, tools=[TOOL]) != render(HI, tools=[other]) != render(HI, tools=[other, TOOL])


def test_tools_the_template_knows_are_left_to_it():
    source = "{% if tools %}{{ tools[0] | tojson }}{% endif %}{{ messages | length }}"
    assert render(HI, source, tools=[TOOL]) == json.dumps(TOOL) + "1"
    assert render(HI, source, tools=[]) == render(HI, source) == "1"


def test_tool_calls_reach_the_prompt_either_way():
    asks = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert render([*HI, asks]) == (
        '[user]hi[assistant]<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>>'
    )
    spoken = render([*HI, {**asks, "content": "well"}])
    assert '[assistant]well\n<tool_call>{"name"' in spoken
    knowing = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}"
        "{% endfor %}"
    )
    assert render([*HI, asks], knowing) == "1"


def test_helpers_templates_expect():
    assert render(HI, "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "<s>hi</s>"
    assert render(HI, "{{ {'a': \"'<é>\"} | tojson }}") == '{"a": "\'<é>"}'
    assert (
        render(HI, "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    )
    assert render(HI, "a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"
    assert render(HI, "{{ strftime_now('%Y') | length }}") == "4"
    assert render(HI, "{{ thinking }}", template_kwargs={"thinking": "off"}) == "off"
    assert render(HI, "  {% if true %}\nx\n  {% endif %}\n") == "x\n"


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "at least one message"),
        ("hi", "must be a list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"role": "robot", "content": "x"}], "unknown role 'robot'"),
        ([{"role": ["user"], "content": "x"}], "unknown role"),
        ([{"content": "x"}], "unknown role None"),
        ([{"role": "user"}], "content must be a string"),
        ([{"role": "user", "content": 5}], "content must be a string"),
        (
            [*HI, {"role": "user", "content": [{"type": "image_url"}]}],
            r"messages\[1\].*'image_url' is not supported",
        ),
        ([{"role": "user", "content": ["x"]}], "not supported"),
        ([{"role": "user", "content": [{"type": "text"}]}], "needs a string 'text'"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "function with a name"),
        ([{"role": "assistant", "content": None, "tool_calls": {"a": 1}}], "tool_calls must be a list"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "arguments are not JSON",
        ),
    ],
)
def test_messages_that_cannot_be_rendered(messages, message):
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render(messages)
    assert isinstance(caught.value, RequestError) and isinstance(caught.value, ValueError)


def test_what_the_template_refuses_or_trips_over():
    with pytest.raises(ChatTemplateError, match="refused the messages: roles must alternate"):
        render(HI, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="failed on these messages"):
        render(HI, "{{ messages[0].content + 1 }}")
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% if %}", {})
    with pytest.raises(ChatTemplateError, match="may not replace messages"):
        render(HI, template_kwargs={"messages": []})


def test_a_template_is_sandboxed():
    for attack in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"):
        with pytest.raises(ChatTemplateError):
            render(HI, attack)
    assert "__builtins__" not in render(HI, "{{ raise_exception.__globals__ }}")


def test_callers_messages_are_not_changed():
    messages = [{"role": "developer", "content": [{"type": "text", "text": "x"}], "name": None}]
    before = json.dumps(messages)
    render(messages, tools=[TOOL])
    assert json.dumps(messages) == before
