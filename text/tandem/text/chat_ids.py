"""Ids of calls in a form that a chat template accepts.

Some templates refuse a history whose ids have another form than their model's own. Clients send ids
of any form: Tandem's, OpenAI's, Anthropic's. A call and its result get the same new id in every
turn.
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
    """A form of ids: ``prefix`` and ``length`` characters of ``letters``."""

    letters: str
    length: int
    prefix: str = ""

    def has(self, call_id: str) -> bool:
        """Return whether an id has this form."""
        rest = call_id.removeprefix(self.prefix)
        pattern = f"[{re.escape(self.letters)}]{{{self.length}}}"
        return self.prefix + rest == call_id and re.fullmatch(pattern, rest) is not None

    def make(self, call_id: str, number: int = 0) -> str:
        """Return this form's id for another id; ``number`` distinguishes ids with equal results."""
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
"""Forms that are tried until a template accepts one."""
FOREIGN = (
    "call_0123456789abcdef01234567",
    "call_aB3dE5fG7hJ9kL1mN3pQ5rS7",
    "toolu_01A09q90qw90lq917835lq9",
    "chatcmpl-tool-0123456789abcdef0123456789abcdef",
    "functions.zqtool:0",
)
"""Examples of ids that servers make."""


def with_form(messages: Sequence[Message], form: IdForm) -> list[Message]:
    """Return ``messages`` with every id in ``form``. Ids in that form stay, and different ids stay
    different. A call without an id gets one. A result without an id gets that of the oldest call
    without a result."""
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
    """Return the id as a text; empty if there is none."""
    found = call.get("id")
    return "" if found is None else str(found)
