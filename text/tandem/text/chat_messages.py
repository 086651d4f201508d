"""Makes OpenAI's chat messages what chat templates expect: checked, plain, one form of content.

Called by ``chat_template`` before rendering. Checks only what every template needs; the template
itself refuses what it cannot render.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.protocol.errors import InvalidParameter

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Message = dict[str, Any]


def plain_messages(
    messages: Sequence[Mapping[str, Any]], *, keeps_parts: bool, knows_developer: bool
) -> list[Message]:
    """Copies of ``messages`` for a template, without keys whose value is None.

    Content in parts becomes one text unless the template walks over parts (``keeps_parts``);
    ``developer`` becomes ``system`` where the template never heard of it. Raises InvalidParameter
    that names the message and the key.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidParameter("messages", messages, "a list of messages")
    if not messages:
        raise InvalidParameter("messages", [], "at least one message")
    plain = [_plain(f"messages[{index}]", each) for index, each in enumerate(messages)]
    for index, message in enumerate(plain):
        if message["role"] == "developer" and not knows_developer:
            message["role"] = "system"
        content = message.get("content")
        if not keeps_parts and isinstance(content, list):
            message["content"] = _join_parts(f"messages[{index}].content", content)
    return plain


def _plain(where: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidParameter(where, message, "an object with role and content")
    plain = {key: value for key, value in message.items() if value is not None}
    role = plain.get("role")
    if role not in ROLES:
        raise InvalidParameter(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    _check_content(f"{where}.content", plain, role)
    if "tool_calls" in plain:
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _check_content(where: str, message: Message, role: str) -> None:
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise InvalidParameter(where, None, "a text or a list of parts")
    elif not isinstance(content, str | list):
        raise InvalidParameter(where, content, "a text or a list of parts")


def _join_parts(where: str, parts: list[Any]) -> str:
    return "\n".join(_part_text(f"{where}[{index}]", part) for index, part in enumerate(parts))


def _part_text(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise InvalidParameter(where, part, 'a part {"type": "text", "text": ...}: text only')
    return text


def _plain_call(call: Any) -> Any:
    """Templates want a call's arguments as an object; OpenAI sends them as JSON in a string."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError:
            return call
    return {**call, "function": function}
