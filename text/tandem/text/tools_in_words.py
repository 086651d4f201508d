"""Tools for chat templates that have no word for them: definitions, calls and results as text.

The form is Hermes': ``choose`` takes that format for such templates, so that what the model is
taught here is what is looked for in its answer. Called by ``chat_template``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.text.chat_calls import plain_calls

FORMAT = "hermes"
_MARKS = ("tool", "function", "python_tag", "<|channel|>")
"""Texts of which one stands in every template that shows tools or calls, in small letters."""
_SYSTEM = ("system", "developer")


def knows_no_tools(source: str) -> bool:
    """Whether a template's source shows a model neither tools nor calls."""
    small = source.lower()
    return not any(mark in small for mark in _MARKS)


def in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return a chat without calls and results as such, and with ``tools`` in its system message.

    Raises InvalidParameter that names a call that is none.
    """
    written = [_written(index, each) for index, each in enumerate(messages)]
    return _with_tools(written, tools)


def _written(index: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        return message  # ``plain_messages`` names it
    if message.get("role") == "tool":
        text = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = plain_calls(f"messages[{index}]", message) if message.get("tool_calls") else []
    if not calls:
        return message
    words = [_text(message.get("content"))] if message.get("content") else []
    for call in calls:
        function = call["function"]
        asked = {"name": function["name"], "arguments": function["arguments"]}
        words.append(f"<tool_call>\n{json.dumps(asked, ensure_ascii=False)}\n</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(words)}


def _with_tools(
    messages: list[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    functions = [json.dumps(each.get("function", each), ensure_ascii=False) for each in tools]
    taught = (
        "You may call functions. These are there, each as a JSON object:\n<tools>\n"
        + "\n".join(functions)
        + "\n</tools>\nTo call one, write\n<tool_call>\n"
        '{"name": "the function\'s name", "arguments": {"its arguments": "as JSON"}}\n'
        "</tool_call>\nand wait: its result comes in <tool_response>. "
        "If you have the result, answer with it."
    )
    first = messages[0] if messages else {}
    if not isinstance(first, Mapping) or first.get("role") not in _SYSTEM:
        return [{"role": "system", "content": taught}, *messages]
    content = first.get("content")
    if isinstance(content, list):
        joined: Any = [*content, {"type": "text", "text": f"\n\n{taught}"}]
    else:
        joined = f"{content}\n\n{taught}" if content else taught
    return [{**first, "content": joined}, *messages[1:]]


def _text(content: Any) -> str:
    if isinstance(content, list):
        texts = [each.get("text", "") for each in content if isinstance(each, Mapping)]
        return "\n".join(str(each) for each in texts)
    return "" if content is None else str(content)
