"""Bounds of a chat's text, checked before a template renders it.

A template cannot be stopped while it renders, and its output is measured too late. Some append each
system message to all earlier ones, and copy them every time. Called by ``Tokenizer.render_chat`` if
a server has set a bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.protocol.errors import InvalidParameter

MOST_COPIED = 64
"""Maximum characters of system messages, each counted with all earlier ones, in multiples of the
bound. Copying them takes a second at most."""


def check_chat(messages: Sequence[Mapping[str, Any]], most_chars: int) -> None:
    """Raise InvalidParameter for a chat of more than ``most_chars`` characters. Also raises for so
    many long system messages that joining them one by one takes long. Invalid messages are not
    counted."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        return
    whole = system = copied = 0
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        size = _message_size(message)
        whole += size
        if message.get("role") in ("system", "developer"):
            system += size
            copied += system
    if whole > most_chars:
        allowed = f"at most {most_chars} characters in all messages; they have {whole}"
        raise InvalidParameter("messages", messages, allowed)
    if copied > MOST_COPIED * most_chars:
        allowed = (
            f"fewer or shorter system messages: each counted with all before it they have {copied} "
            f"characters, of {MOST_COPIED * most_chars} at most"
        )
        raise InvalidParameter("messages", messages, allowed)


def _message_size(message: Mapping[str, Any]) -> int:
    """Return the characters of all that templates write of a message. Reasoning under both of its
    names counts once."""
    thoughts = (message.get("reasoning"), message.get("reasoning_content"))
    calls = (message.get("tool_calls"), message.get("function_call"))
    said = _size(message.get("content")) + _size(message.get("refusal"))
    return said + max(map(_size, thoughts)) + sum(map(_all_texts, calls))


def _all_texts(value: object) -> int:
    """Return the characters of all texts in a value at any depth, including member names."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _all_texts(each) for key, each in value.items())
    return sum(map(_all_texts, value)) if isinstance(value, list) else 0


def _size(content: object) -> int:
    """Return the characters of a message's text, also in parts."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, Mapping):
        return sum(len(each) for each in content.values() if isinstance(each, str))
    return sum(map(_size, content)) if isinstance(content, list) else 0
