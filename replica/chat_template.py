"""Chat messages to prompt text, by the model's own Jinja template in a sandbox.

Templates come with model files, so they run in Jinja's immutable sandbox with the helpers Hugging Face
templates expect: `raise_exception`, `strftime_now`, a plain `tojson`, loop controls and the `{% generation
%}` block.

What a template does not know is written into the messages before it sees them, so that nothing a caller
sends is lost:

- `developer` becomes `system`;
- content given as parts of type "text" is joined;
- if the template never mentions `tools`, the schemas are appended to the system message (one is made if
absent) as

      # Tools
      You may call one or more of these functions. Answer with <tool_call>{"name": ..., "arguments":
      ...}</tool_call>. <tools>
      {one JSON object a line}
      </tools>

- if it never mentions `tool_calls`, an assistant's calls are appended to its content in that same
<tool_call> form.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from replica.errors import ChatTemplateError

ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})

_TOOL_PREAMBLE = (
    "# Tools\nYou may call one or more of these functions. "
    'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.\n<tools>\n'
)
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})

Message = dict[str, Any]


class ChatTemplate:
    """A compiled template. Rendering is thread-safe.

    Raises `ChatTemplateError` when the source does not compile.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self.source = source
        self._special = special_tokens
        environment = _environment()
        try:
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template does not compile: {error}") from error
        self._knows_tools = "tools" in names
        self._knows_calls = "tool_calls" in source

    def render(
        self,
        messages: list[Message],
        tools: list[Message] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Message | None = None,
    ) -> str:
        """The prompt text.

        Raises `ChatTemplateError` for messages of unknown role or shape, and for what the template itself
        refuses.
        """
        extra = template_kwargs or {}
        if taken := _RESERVED & extra.keys():
            raise ChatTemplateError(f"template arguments may not replace {', '.join(sorted(taken))}")
        prepared = self._prepare(messages, tools or [])
        values = {**self._special, **extra}
        try:
            return self._template.render(
                values, messages=prepared, tools=tools or None, add_generation_prompt=add_generation_prompt
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            # The template is foreign code: whatever it trips over in the messages is the request's fault.
            raise ChatTemplateError(f"the chat template failed on these messages: {error}") from error

    def _prepare(self, messages: list[Message], tools: list[Message]) -> list[Message]:
        if not isinstance(messages, list) or not messages:
            raise ChatTemplateError("messages must be a list with at least one message")
        prepared = [self._message(message, index) for index, message in enumerate(messages)]
        if tools and not self._knows_tools:
            return _with_tools(prepared, tools)
        return prepared

    def _message(self, message: Message, index: int) -> Message:
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise ChatTemplateError(f"{where} must be an object")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise ChatTemplateError(f"{where}: unknown role {role!r} (known: {', '.join(sorted(ROLES))})")
        calls = _tool_calls(message, where)
        content = _content(message.get("content"), where, optional=bool(calls))
        result = {key: value for key, value in message.items() if value is not None}
        result |= {"role": "system" if role == "developer" else role, "content": content}
        if calls and self._knows_calls:
            result["tool_calls"] = calls
        elif calls:
            del result["tool_calls"]
            result["content"] = "\n".join([*([content] if content else []), *map(_plain_call, calls)])
        return result


def _content(content: Any, where: str, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list):
        raise ChatTemplateError(f"{where}: content must be a string or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text"):
            raise ChatTemplateError(f"{where}: content part of type {kind!r} is not supported, only text")
        if not isinstance(part.get("text"), str):
            raise ChatTemplateError(f"{where}: a text part needs a string 'text'")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(message: Message, where: str) -> list[Message]:
    """The calls with arguments as objects, which templates expect; OpenAI sends them as JSON text."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ChatTemplateError(f"{where}: tool_calls must be a list")
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ChatTemplateError(f"{where}: each tool call needs a function with a name")
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise ChatTemplateError(f"{where}: tool call arguments are not JSON: {error}") from error
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


def _plain_call(call: Message) -> str:
    function = call["function"]
    body = _to_json({"name": function["name"], "arguments": function["arguments"]})
    return f"<tool_call>{body}</tool_call>"


def _with_tools(messages: list[Message], tools: list[Message]) -> list[Message]:
    text = _TOOL_PREAMBLE + "".join(f"{_to_json(tool)}\n" for tool in tools) + "</tools>"
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    content = f"{first['content']}\n\n{text}" if first["content"] else text
    return [{**first, "content": content}, *messages[1:]]


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Jinja's own `tojson` escapes for HTML, which would put &#39; into prompts."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; prompts keep its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
