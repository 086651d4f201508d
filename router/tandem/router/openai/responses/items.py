"""Items of a conversation: checked as clients write them, and the chat that they make.

A plain item has an id and its text in parts, so that it can be stored and listed as it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandem.protocol.errors import InvalidParameter
from tandem.router.openai.bodies import parameters
from tandem.router.openai.bodies.unknown_fields import UnknownFields

Item = dict[str, Any]
Message = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "message": ("type", "id", "status", "role", "content"),
    "function_call": ("type", "id", "status", "call_id", "name", "arguments", "parsed_arguments"),
    "function_call_output": ("type", "id", "status", "call_id", "output"),
    "reasoning": ("type", "id", "status", "summary", "content"),
}
"""Kind of an item to its keys; ids, statuses and what a client parsed change no answer."""
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}
_PART_KEYS = ("type", "text", "refusal", "annotations", "logprobs", "parsed")
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_PART = 'a part of type "input_text", "output_text" or "refusal": this server takes text alone'


def new_id(kind: str) -> str:
    """An id for an item, as OpenAI's look."""
    return f"{_PREFIXES.get(kind, 'rs')}_{secrets.token_hex(16)}"


def plain_items(given: str | Sequence[Mapping[str, Any]], unknown: UnknownFields) -> list[Item]:
    """The body's ``input`` as plain items. Raises InvalidParameter that names the place."""
    if isinstance(given, str):
        return [_message({"role": "user", "content": given}, "input")]
    return [_plain(f"input[{index}]", each, unknown) for index, each in enumerate(given)]


def _plain(where: str, item: Mapping[str, Any], unknown: UnknownFields) -> Item:
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    if not isinstance(kind, str) or kind not in _KEYS:
        raise InvalidParameter(f"{where}.type", kind, f"one of {', '.join(_KEYS)}")
    for name, value in item.items():
        refused = parameters.RESPONSE_ITEM.get(name)
        if name in _KEYS[kind]:
            continue
        if refused is None:
            unknown.meet(f"{where}.", name, value, _KEYS[kind])
        else:
            refused.check(f"{where}.{name}", value)
    if kind == "message":
        return _message(item, where)
    if kind == "reasoning":
        return _reasoning(item, where)
    plain: Item = {"type": kind, "id": _id(item, kind, where), "status": "completed"}
    plain["call_id"] = _text(item, "call_id", where)
    if kind == "function_call":
        for name in ("name", "arguments"):
            plain[name] = _text(item, name, where)
        return plain
    output = item.get("output")
    plain["output"] = output if isinstance(output, str) else _parts(f"{where}.output", output)
    return plain


def _message(item: Mapping[str, Any], where: str) -> Item:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise InvalidParameter(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    if isinstance(content, str):
        parts = [output_text(content) if role == "assistant" else _input_text(content)]
    else:
        parts = _parts(f"{where}.content", content)
    item_id = _id(item, "message", where)
    return {"type": "message", "id": item_id, "status": "completed", "role": role, "content": parts}


def _reasoning(item: Mapping[str, Any], where: str) -> Item:
    texts: dict[str, list[dict[str, str]]] = {"summary": [], "content": []}
    for name, found in texts.items():
        for index, part in enumerate(item.get(name) or ()):
            text = part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str):
                raise InvalidParameter(f"{where}.{name}[{index}]", part, "a part with a text")
            kind = "summary_text" if name == "summary" else "reasoning_text"
            found.append({"type": kind, "text": text})
    return {"type": "reasoning", "id": _id(item, "reasoning", where), **texts}


def _parts(where: str, content: object) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        raise InvalidParameter(where, content, "a text or a list of parts")
    return [_part(f"{where}[{index}]", part) for index, part in enumerate(content)]


def _part(where: str, part: object) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = _TEXTS.get(kind, "") if isinstance(kind, str) else ""
    text = part.get(key) if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(text, str):
        raise InvalidParameter(where, part, _PART)
    for name, value in part.items():
        if name not in _PART_KEYS and value is not None:
            raise InvalidParameter(f"{where}.{name}", value, "leave it out")
    if kind == "refusal":
        return {"type": "refusal", "refusal": text}
    return output_text(text) if kind == "output_text" else _input_text(text)


def _input_text(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def output_text(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """A part of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _id(item: Mapping[str, Any], kind: str, where: str) -> str:
    return new_id(kind) if item.get("id") is None else _text(item, "id", where)


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidParameter(f"{where}.{name}", value, "a text")
    return value


def messages_of(instructions: str | None, earlier: Iterable[Item], now: Sequence[Item]) -> Any:
    """The chat of a conversation: ``earlier`` items, and those of a body's ``input``.

    What an assistant thought, said and called in one go is one message. Raises InvalidParameter for
    the result of a call that nobody made.
    """
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    called: set[str] = set()
    for item in earlier:
        _add(messages, item, called)
    for index, item in enumerate(now):
        if item["type"] == "function_call_output" and item["call_id"] not in called:
            allowed = "the call_id of a function_call before it"
            raise InvalidParameter(f"input[{index}].call_id", item["call_id"], allowed)
        _add(messages, item, called)
    return messages


def _add(messages: list[Message], item: Item, called: set[str]) -> None:
    kind = item["type"]
    if kind == "message":
        content = _content(item["content"])
        if item["role"] == "assistant":
            _assistant(messages, "content", "tool_calls")["content"] = content
        else:
            messages.append({"role": item["role"], "content": content})
    elif kind == "reasoning":
        text = "\n".join(part["text"] for part in item["content"] or item["summary"])
        turn = _assistant(messages, "reasoning_content", "content", "tool_calls")
        turn["reasoning_content"] = text
    elif kind == "function_call":
        called.add(item["call_id"])
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    else:
        output = item["output"]
        content = output if isinstance(output, str) else _content(output)
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})


def _assistant(messages: list[Message], *taken: str) -> Message:
    """The assistant's message that goes on, or a new one where it has one of ``taken`` already."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in taken):
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, str]]:
    texts = [part["refusal" if part["type"] == "refusal" else "text"] for part in parts]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
