"""Text form of tools for chat templates without tool support: definitions, calls and results.

The form is Hermes': ``choose`` selects that format for such templates, so that the model's answer
is parsed in the format that it was shown. Called by ``chat_template``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.text.chat_messages import Message

FORMAT = "hermes"
_MARKS = ("tool", "function", "python_tag", "<|channel|>")
"""Texts of which every template that shows tools or calls contains one, in small letters."""
_SYSTEM = ("system", "developer")


def knows_no_tools(source: str) -> bool:
    """Return whether a template's source does not show tools or calls to a model."""
    small = source.lower()
    return not any(mark in small for mark in _MARKS)


def in_words(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a chat with calls and results as text, and with ``tools`` in its system message."""
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
