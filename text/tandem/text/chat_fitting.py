"""Conversion of normalized messages to the form that a template accepts (``template_traits``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.text.chat_ids import with_form
from tandem.text.chat_turns import in_turns
from tandem.text.template_traits import CALLS, INVALID, TemplateTraits

Message = dict[str, Any]


def fitted(messages: Sequence[Message], traits: TemplateTraits) -> list[Message]:
    """Return messages with the same content, in the form that the template accepts."""
    found = [_with_role(each, traits) for each in messages]
    found = [_with_content(each, traits) for each in found]
    if any("tool_calls" in each or each["role"] == "tool" for each in found):
        if traits.id_form is not None:
            found = with_form(found, traits.id_form)
        found = [_with_arguments(each, traits) for each in found]
    return in_turns(found, traits.turns) if _needs_turns(found) else found


def _needs_turns(messages: Sequence[Message]) -> bool:
    """Return whether the chat is more than plain turns of user and assistant."""
    usual = ("user", "assistant")
    return any(
        each["role"] != usual[at % 2] or "tool_calls" in each for at, each in enumerate(messages)
    )


def _with_role(message: Message, traits: TemplateTraits) -> Message:
    if message["role"] == "developer" and not traits.knows_developer:
        return {**message, "role": "system"}
    if message["role"] == "function" and not traits.knows_function:
        return {**message, "role": "tool"}
    return message


def _with_content(message: Message, traits: TemplateTraits) -> Message:
    kind = CALLS if "tool_calls" in message else message["role"]
    content = message["content"]
    if isinstance(content, list):
        if not traits.takes_parts(kind):
            content = "\n".join(part["text"] for part in content)
    elif content and traits.needs_parts(kind):
        content = [{"type": "text", "text": content}]
    if traits.asks_for_none and kind == CALLS and not content:
        content = None
    return {**message, "content": content}


def _with_arguments(message: Message, traits: TemplateTraits) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call, traits)}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _arguments(call: Mapping[str, Any], traits: TemplateTraits) -> object:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        if not traits.wraps_invalid:
            return arguments
        arguments = {INVALID: arguments}
    return json.dumps(arguments, ensure_ascii=False) if traits.writes_arguments else arguments
