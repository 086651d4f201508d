"""Order of roles that a chat template accepts, and reordering of chats to fit it.

All text of a chat keeps its order.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class IdForm:
    """Form of ids: ``prefix`` and ``length`` characters of ``letters``."""

    letters: str
    length: int
    prefix: str = ""

    def has(self, call_id: str) -> bool:
        rest = call_id.removeprefix(self.prefix)
        pattern = f"[{re.escape(self.letters)}]{{{self.length}}}"
        return self.prefix + rest == call_id and re.fullmatch(pattern, rest) is not None

    def make(self, call_id: str, number: int = 0) -> str:
        """Return this form's id for another id; ``number`` distinguishes equal results."""
        digest = hashlib.sha256(f"{number}:{call_id}".encode(errors="surrogatepass")).digest()
        value = int.from_bytes(digest)
        letters = []
        for _ in range(self.length):
            value, index = divmod(value, len(self.letters))
            letters.append(self.letters[index])
        return self.prefix + "".join(letters)


_ALL = string.ascii_letters + string.digits
_HEX = "0123456789abcdef"
OURS = IdForm(_HEX, 24, "call_")
FORMS = (
    OURS,
    IdForm(_ALL, 9),
    IdForm(_ALL, 24, "call_"),
    *(IdForm(_ALL, length) for length in (8, 10, 12, 16, 24, 32)),
    *(IdForm(_HEX, length) for length in (8, 16, 24, 32)),
    *(IdForm(string.digits, length) for length in (9, 8, 6, 10, 12)),
)
"""Forms that are tried in this order."""
FOREIGN = (
    "call_0123456789abcdef01234567",
    "call_aB3dE5fG7hJ9kL1mN3pQ5rS7",
    "toolu_01A09q90qw90lq917835lq9",
    "chatcmpl-tool-0123456789abcdef0123456789abcdef",
    "functions.zqtool:0",
)
"""Examples of ids that servers make."""


def with_form(messages: Sequence[Message], form: IdForm) -> list[Message]:
    """Return ``messages`` with every id in ``form``; different ids stay different.

    A call without an id gets one. A result without an id gets that of the oldest call without a
    result.
    """
    known = {each for each in _ids(messages) if form.has(each)}
    made: dict[str, str] = {}
    waiting: list[str] = []

    def new(call_id: str) -> str:
        if form.has(call_id):
            return call_id
        if call_id not in made:
            number = 0
            while (found := form.make(call_id, number)) in known:
                number += 1
            made[call_id] = found
            known.add(found)
        return made[call_id]

    fitted: list[Message] = []
    for at, message in enumerate(messages):
        if "tool_calls" in message:
            calls = [
                {**call, "id": new(_id_of(call) or f"{at}:{index}")}
                for index, call in enumerate(message["tool_calls"])
            ]
            waiting += [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            call_id = new(given) if given else next(iter(waiting), new(f"{at}"))
            if call_id in waiting:
                waiting.remove(call_id)
            message = {**message, "tool_call_id": call_id}
        fitted.append(message)
    return fitted


def _ids(messages: Sequence[Message]) -> list[str]:
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    results = [str(message.get("tool_call_id") or "") for message in messages]
    return [*map(_id_of, calls), *results]


def _id_of(call: Mapping[str, Any]) -> str:
    found = call.get("id")
    return "" if found is None else str(found)


Content = str | list[dict[str, Any]]

_BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Repairs of a chat. Most templates need none."""

    joins_users: bool = False
    joins_assistants: bool = False
    """Join consecutive assistant messages and their calls."""
    answers: str | None = None
    """Assistant message to insert between a call or its result and a user message."""
    asks: str | None = None
    """User message to insert before an assistant message that begins the chat."""
    frees_results: bool = False
    """Convert results without a call to user messages."""
    splits_calls: bool = False
    """Split the calls of one message, each before its result."""
    joins_systems: bool = False
    moves_later_systems: bool = False
    """Convert system messages after the beginning to user messages."""
    has_no_system: bool = False
    """Convert all system messages to user messages."""
    needs_user_last: bool = False
    """Put the first system message into the last user message.

    The template shows it only in a user message that ends the chat.
    """


def in_turns(messages: Sequence[Message], turns: Turns) -> list[Message]:
    """Return the chat in the order that a template accepts."""
    found = _without_lone_results(messages) if turns.frees_results else list(messages)
    if turns.splits_calls:
        found = _with_single_calls(found)
    found = _systems(found, turns)
    if turns.needs_user_last and found[-1]["role"] != "user":
        found = _in_last_user(found)
    if turns.asks is not None:
        found = _with_question(found, turns.asks)
    joined: list[Message] = []
    for message in found:
        last = joined[-1] if joined else None
        if last is not None and _is_joined(last, message, turns):
            joined[-1] = _joined(last, message)
            continue
        if turns.answers is not None and _is_open(last) and message["role"] == "user":
            joined.append({"role": "assistant", "content": turns.answers})
        joined.append(message)
    return joined


def _systems(messages: list[Message], turns: Turns) -> list[Message]:
    first = _num_systems(messages)
    lead, rest = messages[:first], messages[first:]
    if turns.joins_systems and len(lead) > 1:
        whole = lead[0]
        for each in lead[1:]:
            whole = _joined(whole, each)
        lead = [whole]
    if turns.has_no_system:
        lead = [{**each, "role": "user"} for each in lead]
    if turns.moves_later_systems:
        rest = [{**each, "role": "user"} if _is_system(each) else each for each in rest]
    return [*lead, *rest]


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    found: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        results = at
        while at < len(messages) and messages[at]["role"] == "tool":
            at += 1
        left = list(messages[results:at])
        for number, call in enumerate(calls):
            content = message["content"] if number == 0 else message["content"] and ""
            found.append({**message, "content": content, "tool_calls": [call]})
            own = [each for each in left if each.get("tool_call_id") == call.get("id")]
            found += own
            left = [each for each in left if each not in own]
        found += left
    return found


def _in_last_user(messages: list[Message]) -> list[Message]:
    first = _num_systems(messages)
    users = [at for at, each in enumerate(messages) if each["role"] == "user"]
    if not (first and users):
        return messages
    last = messages[users[-1]]
    for each in reversed(messages[:first]):
        last = {**last, "content": _contents(each["content"], last["content"])}
    return [*messages[first : users[-1]], last, *messages[users[-1] + 1 :]]


def _num_systems(messages: Sequence[Message]) -> int:
    return next(
        (at for at, each in enumerate(messages) if not _is_system(each)),
        len(messages),
    )


def _is_system(message: Message) -> bool:
    return message["role"] in ("system", "developer")


def _with_question(messages: list[Message], question: str) -> list[Message]:
    first = _num_systems(messages)
    if first == len(messages) or messages[first]["role"] != "assistant":
        return messages
    return [*messages[:first], {"role": "user", "content": question}, *messages[first:]]


def _without_lone_results(messages: Sequence[Message]) -> list[Message]:
    calls: set[str] = set()
    found: list[Message] = []
    for message in messages:
        calls |= {str(call.get("id")) for call in message.get("tool_calls", ())}
        lone = message["role"] == "tool" and str(message.get("tool_call_id")) not in calls
        found.append({"role": "user", "content": message["content"]} if lone else message)
    return found


def _is_joined(last: Message, message: Message, turns: Turns) -> bool:
    role = message["role"]
    if last["role"] != role:
        return False
    return turns.joins_users if role == "user" else turns.joins_assistants and role == "assistant"


def _is_open(last: Message | None) -> bool:
    """Return whether an assistant's message must follow: it has called, or results came."""
    return last is not None and (last["role"] == "tool" or "tool_calls" in last)


def _joined(first: Message, second: Message) -> Message:
    whole = {**second, **first}
    whole["content"] = _contents(first["content"], second["content"])
    for key in ("reasoning", "reasoning_content"):
        if key in first and key in second:
            whole[key] = first[key] + _BETWEEN + second[key]
    if "tool_calls" in whole:
        whole["tool_calls"] = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return whole


def _contents(first: Content | None, second: Content | None) -> Content | None:
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return first + _BETWEEN + second
    return [*_parts(first), {"type": "text", "text": _BETWEEN}, *_parts(second)]


def _parts(content: Content) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
