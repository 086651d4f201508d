"""Messages of blocks as clients write them, and the chat that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.protocol.errors import InvalidParameter
from tandem.router.openai.bodies.reading import Reading

Message = dict[str, Any]
Content = str | Sequence[Mapping[str, Any]]

_ROLES = ("user", "assistant", "system")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "text": ("type", "text", "cache_control", "citations"),
    "thinking": ("type", "thinking", "signature", "cache_control"),
    "tool_use": ("type", "id", "name", "input", "cache_control", "caller"),
    "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control"),
}
"""Kind of a block to its keys; cache marks, citations and signatures change no answer."""
_OF_ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
FAILED = "Error: "
"""Prefix of the result of a tool that failed: templates have no other form for it."""


def messages_of(
    system: Content | None, messages: Sequence[Mapping[str, Any]], reading: Reading
) -> list[Message]:
    """Return the messages of the chat. Raises InvalidParameter that names the place."""
    found: list[Message] = []
    if system:
        parts = _texts("system", _blocks("system", system, "system", reading))
        found.append({"role": "system", "content": parts})
    called: set[str] = set()
    for index, each in enumerate(messages):
        where = f"messages[{index}]"
        role = each.get("role")
        if role not in _ROLES:
            raise InvalidParameter(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
        for name, value in each.items():
            if name not in ("role", "content"):
                reading.meet(f"{where}.", name, value, ("role", "content"))
        where = f"{where}.content"
        blocks = _blocks(where, each.get("content"), role, reading)
        if role == "assistant":
            found.append(_said(where, blocks, called))
        else:
            found += _asked(where, role, blocks, called)
    if not messages:
        raise InvalidParameter("messages", [], "at least one message")
    return found


def _blocks(where: str, content: object, role: str, reading: Reading) -> list[Mapping[str, Any]]:
    """Return the blocks of a content, each of a kind that the role may have."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidParameter(where, content, "a text or a list of blocks")
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "redacted_thinking" and role == "assistant":
            reading.ignore("messages.content.redacted_thinking")
            continue
        if kind not in _OF_ROLES[role]:
            allowed = f"one of {', '.join(_OF_ROLES[role])}: this server takes text alone"
            raise InvalidParameter(f"{at}.type", kind, allowed)
        for name, value in block.items():
            if name not in _KEYS[kind] and value is not None:
                reading.meet(f"{at}.", name, value, _KEYS[kind])
        if block.get("cache_control") is not None:
            reading.ignore("messages.content.cache_control")
    return content


def _said(where: str, blocks: Sequence[Mapping[str, Any]], called: set[str]) -> Message:
    """Return the assistant's message: its reasoning, its text and its calls."""
    message: Message = {"role": "assistant"}
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block["type"] == "text":
            texts.append(_text(at, block, "text"))
        elif block["type"] == "thinking":
            thoughts.append(_text(at, block, "thinking"))
        elif block["type"] == "tool_use":
            given = block.get("input")
            if not isinstance(given, Mapping):
                raise InvalidParameter(f"{at}.input", given, "an object")
            called.add(_text(at, block, "id"))
            function = {"name": _text(at, block, "name"), "arguments": given}
            calls.append({"id": block["id"], "type": "function", "function": function})
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if texts or not calls:
        message["content"] = "".join(texts)
    if calls:
        message["tool_calls"] = calls
    return message


def _asked(
    where: str, role: str, blocks: Sequence[Mapping[str, Any]], called: set[str]
) -> list[Message]:
    """Return the results of tools, a message each, and the text next to them."""
    found: list[Message] = []
    texts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block["type"] == "text":
            texts.append({"type": "text", "text": _text(at, block, "text")})
        else:
            found.append(_result(at, block, called))
    if texts or not found:
        content = texts[0]["text"] if len(texts) == 1 else texts
        found.append({"role": role, "content": content})
    return found


def _result(where: str, block: Mapping[str, Any], called: set[str]) -> Message:
    name = _text(where, block, "tool_use_id")
    if name not in called:
        allowed = "the id of a tool_use before it"
        raise InvalidParameter(f"{where}.tool_use_id", name, allowed)
    content = block.get("content") or ""
    if not isinstance(content, str):
        place = f"{where}.content"
        content = "\n".join(part["text"] for part in _texts(place, _listed(place, content)))
    failed = block.get("is_error")
    if failed not in (None, True, False):
        raise InvalidParameter(f"{where}.is_error", failed, "true or false")
    text = FAILED + content if failed else content
    return {"role": "tool", "tool_call_id": name, "content": text}


def _listed(where: str, content: object) -> list[Mapping[str, Any]]:
    if not isinstance(content, list):
        raise InvalidParameter(where, content, "a text or a list of blocks of type text")
    return content


def _texts(where: str, blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    for index, block in enumerate(blocks):
        if not isinstance(block, Mapping) or block.get("type") != "text":
            allowed = "a block of type text: this server takes text alone"
            raise InvalidParameter(f"{where}[{index}]", block, allowed)
    texts = [_text(f"{where}[{index}]", block, "text") for index, block in enumerate(blocks)]
    return [{"type": "text", "text": text} for text in texts]


def _text(where: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidParameter(f"{where}.{name}", value, "a text")
    return value
