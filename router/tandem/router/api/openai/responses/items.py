"""Items of a conversation, and their chat.

A plain item has an id and text in parts, so that it can be stored and listed.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandem.protocol.errors import InvalidParameter
from tandem.router.api.openai.bodies import hints
from tandem.router.api.openai.bodies.hints import Reading
from tandem.router.api.openai.bodies.parameters import RESPONSE_ITEM

Item = dict[str, Any]
Message = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "message": ("type", "id", "status", "role", "content"),
    "function_call": ("type", "id", "status", "call_id", "name", "arguments", "parsed_arguments"),
    "function_call_output": ("type", "id", "status", "call_id", "output"),
    "reasoning": ("type", "id", "status", "summary", "content"),
    "custom_tool_call": ("type", "id", "status", "call_id", "name", "input"),
    "custom_tool_call_output": ("type", "id", "status", "call_id", "output"),
    "local_shell_call": ("type", "id", "status", "call_id", "action"),
    "local_shell_call_output": ("type", "id", "status", "call_id", "output"),
    "shell_call": ("type", "id", "status", "call_id", "action", "environment"),
    "shell_call_output": ("type", "id", "status", "call_id", "output", "max_output_length"),
    "apply_patch_call": ("type", "id", "status", "call_id", "operation"),
    "apply_patch_call_output": ("type", "id", "status", "call_id", "output"),
}
"""Keys by kind of item; ids, statuses and parsed values have no effect."""
_CALLS: Mapping[str, tuple[str, str]] = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
"""Tool and argument key by kind of call."""
_ENDS_CALL = "_output"
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
}
_PART_KEYS = ("type", "text", "refusal", "annotations", "logprobs", "parsed")
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_PART = 'a part of type "input_text", "output_text" or "refusal": this server accepts text only'


def new_id(kind: str) -> str:
    """Return a new id of an item, in OpenAI's format."""
    return f"{_PREFIXES.get(kind, 'rs')}_{secrets.token_hex(16)}"


def plain_items(given: str | Sequence[Mapping[str, Any]], reading: Reading) -> list[Item]:
    """Return the ``input`` as plain items, without those of hosted tools.

    Raises InvalidParameter that names the place.
    """
    if isinstance(given, str):
        return [_message({"role": "user", "content": given}, "input")]
    plain: list[Item] = []
    for index, each in enumerate(given):
        kind = each.get("type")
        if isinstance(kind, str) and kind in hints.HOSTED_ITEMS:
            reading.ignore(f"input.{kind}")
        else:
            plain.append(_plain(f"input[{index}]", each, reading))
    return plain


def _plain(where: str, item: Mapping[str, Any], reading: Reading) -> Item:
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    if not isinstance(kind, str) or kind not in _KEYS:
        raise InvalidParameter(f"{where}.type", kind, f"one of {', '.join(_KEYS)}")
    for name, value in item.items():
        refused, hint = RESPONSE_ITEM.get(name), hints.RESPONSE_ITEM.get(name)
        if name in _KEYS[kind]:
            continue
        if refused is not None:
            refused.check(f"{where}.{name}", value)
        elif hint is not None:
            hint.check(f"{where}.{name}", value, reading)
        else:
            reading.meet(f"{where}.", name, value, _KEYS[kind])
    if kind == "message":
        return _message(item, where)
    if kind == "reasoning":
        return _reasoning(item, where)
    return _call_or_output(where, kind, item)


def _call_or_output(where: str, kind: str, item: Mapping[str, Any]) -> Item:
    plain: Item = {"type": kind, "id": _id(item, kind, where), "status": "completed"}
    # Some clients send a shell's output with the call's id only.
    by_id = kind == "local_shell_call_output" and item.get("call_id") is None
    plain["call_id"] = _text(item, "id" if by_id else "call_id", where)
    if kind.endswith(_ENDS_CALL):
        plain["output"] = _output(f"{where}.output", kind, item.get("output"))
    elif kind in _CALLS:
        key = _CALLS[kind][1]
        if not isinstance(item.get(key), Mapping):
            raise InvalidParameter(f"{where}.{key}", item.get(key), "an object")
        plain[key] = item[key]
    else:
        for name in ("name", "arguments" if kind == "function_call" else "input"):
            plain[name] = _text(item, name, where)
    return plain


def _output(where: str, kind: str, output: object) -> str | list[dict[str, Any]]:
    """Return the result of a call: a text or parts; of a shell's commands as JSON."""
    if kind == "apply_patch_call_output" and output is None:
        return ""
    if kind == "shell_call_output":
        if not isinstance(output, list):
            raise InvalidParameter(where, output, "a list of the output of each command")
        return json.dumps(output, ensure_ascii=False)
    return output if isinstance(output, str) else _parts(where, output)


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
    """Return a part of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _id(item: Mapping[str, Any], kind: str, where: str) -> str:
    return new_id(kind) if item.get("id") is None else _text(item, "id", where)


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidParameter(f"{where}.{name}", value, "a text")
    return value


def messages_of(instructions: str | None, earlier: Iterable[Item], now: Sequence[Item]) -> Any:
    """Return the chat of ``earlier`` items and those of a body's ``input``.

    Consecutive reasoning, text and calls of an assistant are one message. Raises InvalidParameter
    for a result without its call.
    """
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    called: set[str] = set()
    for item in earlier:
        _add(messages, item, called)
    for index, item in enumerate(now):
        if item["type"].endswith(_ENDS_CALL) and item["call_id"] not in called:
            allowed = f"the call_id of a {item['type'].removesuffix(_ENDS_CALL)} before it"
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
        if not text:
            return
        turn = _assistant(messages, "reasoning_content", "content", "tool_calls")
        turn["reasoning_content"] = text
    elif not kind.endswith(_ENDS_CALL):
        called.add(item["call_id"])
        call = {"id": item["call_id"], "type": "function", "function": _function(item)}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    else:
        output = item["output"]
        content = output if isinstance(output, str) else _content(output)
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})


def _function(item: Item) -> dict[str, str]:
    kind = item["type"]
    if kind == "function_call":
        return {"name": item["name"], "arguments": item["arguments"]}
    if kind in _CALLS:
        name, key = _CALLS[kind]
        return {"name": name, "arguments": json.dumps(item[key], ensure_ascii=False)}
    arguments = json.dumps({"input": item["input"]}, ensure_ascii=False)
    return {"name": item["name"], "arguments": arguments}


def _assistant(messages: list[Message], *taken: str) -> Message:
    """Return the assistant's message to continue, or a new one if it has one of ``taken``."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in taken):
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, str]]:
    texts = [part["refusal" if part["type"] == "refusal" else "text"] for part in parts]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
