"""Checks chat messages before a template sees them, so that what is wrong can be named precisely."""

from typing import Any

from router.api.body import parse_json
from router.api.errors import ApiError, invalid

ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """The messages, with the JSON text of tool call arguments parsed, which is what templates expect.

    Raises:
        ApiError: 400 with the path of the first wrong field, as in `messages[2].content`.
    """
    if not messages:
        raise invalid("'messages' must have at least one message.", "messages", "empty_array")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def content_size(messages: list[dict[str, Any]]) -> int:
    """Characters of what the (checked) messages say."""
    contents = [message.get("content") or "" for message in messages]
    return sum(sum(len(part["text"]) for part in c) if isinstance(c, list) else len(c) for c in contents)


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(f"'{where}' must be an object.", where, "invalid_type")
    role = message.get("role")
    if role is None:
        raise invalid(
            f"Missing required parameter: '{where}.role'.", f"{where}.role", "missing_required_parameter"
        )
    if not isinstance(role, str):
        raise invalid(f"'{where}.role' must be a string.", f"{where}.role", "invalid_type")
    if role not in ROLES:
        raise invalid(f"Unknown role in '{where}'; known are {', '.join(ROLES)}.", f"{where}.role")
    for name in ("name", "tool_call_id"):
        if not isinstance(message.get(name), str | None):
            raise invalid(f"'{where}.{name}' must be a string.", f"{where}.{name}", "invalid_type")
    calls = message.get("tool_calls")
    if calls:
        message = {**message, "tool_calls": _tool_calls(calls, f"{where}.tool_calls")}
    _check_content(message.get("content"), f"{where}.content", optional=bool(calls) and role == "assistant")
    return message


def _check_content(content: Any, where: str, optional: bool) -> None:
    if isinstance(content, str) or (content is None and optional):
        return
    if content is None:
        raise invalid(f"Missing required parameter: '{where}'.", where, "missing_required_parameter")
    if not isinstance(content, list):
        raise invalid(f"'{where}' must be a string or a list of parts.", where, "invalid_type")
    if not content:
        raise invalid(f"'{where}' must have at least one part.", where, "empty_array")
    for index, part in enumerate(content):
        _check_part(part, f"{where}[{index}]")


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict):
        raise invalid(f"'{where}' must be an object.", where, "invalid_type")
    if part.get("type") != "text":
        raise invalid(f"'{where}': only parts of type 'text' are supported.", f"{where}.type")
    if not isinstance(part.get("text"), str):
        raise invalid(f"'{where}.text' must be a string.", f"{where}.text", "invalid_type")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise invalid(f"'{where}' must be a list.", where, "invalid_type")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"'{where}' must have a function with a name.", where, "invalid_type")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _arguments(arguments, f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _arguments(text: str, where: str) -> Any:
    if not text.strip():
        return {}
    try:
        return parse_json(text.encode())
    except ApiError:
        raise invalid(f"'{where}' is not valid JSON.", where) from None
