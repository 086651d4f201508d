"""Normalization of OpenAI's chat messages: checked, and with one form for each content."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.protocol.errors import InvalidParameter
from tandem.text.chat_calls import plain_calls

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Message = dict[str, Any]

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Key of the text of each type of part."""
_STRINGS = ("name", "tool_call_id", "refusal", "reasoning", "reasoning_content")


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return copies of ``messages`` without null values.

    Raises InvalidParameter that names the message and the key.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidParameter("messages", messages, "a list of messages")
    if not messages:
        raise InvalidParameter("messages", [], "at least one message")
    return [_plain(f"messages[{index}]", each) for index, each in enumerate(messages)]


def _plain(where: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidParameter(where, message, "an object with role and content")
    plain = {key: value for key, value in message.items() if value is not None}
    role = plain.get("role")
    if role not in ROLES:
        raise InvalidParameter(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    for key in _STRINGS:
        if not isinstance(plain.get(key, ""), str):
            raise InvalidParameter(f"{where}.{key}", plain[key], "a text")
    if "audio" in plain:
        raise InvalidParameter(f"{where}.audio", plain["audio"], "leave it out: text only")
    if role == "assistant":
        _plain_assistant(where, plain)
    plain["content"] = _content(f"{where}.content", plain)
    return plain


def _plain_assistant(where: str, message: Message) -> None:
    refusal = message.pop("refusal", "")
    if message.get("content") in (None, ""):
        message["content"] = refusal
    if "reasoning" in message:
        message.setdefault("reasoning_content", message["reasoning"])
    calls = plain_calls(where, message)
    message.pop("function_call", None)
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = calls


def _content(where: str, message: Message) -> str | list[dict[str, str]]:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(where, content, "a text or a list of parts")
    return [_part(f"{where}[{index}]", part) for index, part in enumerate(content)]


def _part(where: str, part: object) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = _TEXTS.get(kind, "") if isinstance(kind, str) else ""
    text = part.get(key) if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(text, str):
        raise InvalidParameter(
            where,
            part,
            'a part {"type": "text", "text": ...} or {"type": "refusal", ...}: text only',
        )
    rest = {name: value for name, value in part.items() if name not in ("type", key)}
    return {"type": "text", "text": text, **rest}


FORMAT = "hermes"
_MARKS = ("tool", "function", "python_tag", "<|channel|>")
"""Every template that shows tools or calls contains one of these texts, in small letters."""
_SYSTEM = ("system", "developer")


def knows_no_tools(source: str) -> bool:
    """Return whether a template's source does not show tools or calls."""
    small = source.lower()
    return not any(mark in small for mark in _MARKS)


def in_words(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a chat with calls and results as text, and ``tools`` in its system message."""
    return _with_tools([_written(each) for each in messages], tools)


def _written(message: Message) -> Message:
    if message["role"] in ("tool", "function"):
        text = f"<tool_response>\n{_text(message['content'])}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = message.get("tool_calls")
    if not calls:
        return message
    words = [_text(message["content"])] if message["content"] else []
    for call in calls:
        function = call["function"]
        asked = {"name": function["name"], "arguments": function["arguments"]}
        words.append(f"<tool_call>\n{json.dumps(asked, ensure_ascii=False)}\n</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(words)}


def _with_tools(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    functions = [json.dumps(each.get("function", each), ensure_ascii=False) for each in tools]
    taught = (
        "You may call functions. These are there, each as a JSON object:\n<tools>\n"
        + "\n".join(functions)
        + "\n</tools>\nTo call one, write\n<tool_call>\n"
        '{"name": "the function\'s name", "arguments": {"its arguments": "as JSON"}}\n'
        "</tool_call>\nand wait: its result comes in <tool_response>. "
        "If you have the result, answer with it."
    )
    first = messages[0]
    if first["role"] not in _SYSTEM:
        return [{"role": "system", "content": taught}, *messages]
    content = first["content"]
    if isinstance(content, list):
        joined: Any = [*content, {"type": "text", "text": f"\n\n{taught}"}]
    else:
        joined = f"{content}\n\n{taught}" if content else taught
    return [{**first, "content": joined}, *messages[1:]]


def _text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(each["text"] for each in content)
