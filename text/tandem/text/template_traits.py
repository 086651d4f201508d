"""Traits of a chat template, found by rendering small chats with marker words.

A template may refuse a form, or silently drop text. A trait is computed on first use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

from tandem.text.chat_turns import FOREIGN, FORMS, OURS, IdForm, Turns, in_turns

Message = dict[str, Any]
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None], str | None]
"""Function that renders messages with tools; None if the template refuses them."""

CALLS = "assistant with calls"
"""Kind of an assistant message with calls; other kinds are roles."""
INVALID = "invalid_arguments"
"""Argument that wraps arguments which are not an object."""
KINDS = ("system", "developer", "user", "assistant", CALLS, "tool", "function")
_FIRST, _SECOND = "zqfirst", "zqsecond"
_WORDS = ("zqone", "zqtwo", "zqthree", "zqfour", "zqfive")
_SHOWN_KEY = "zqmark"
"""Key in a part that is only shown by templates that write out the whole part."""
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "zqtool",
            "description": "Looks up.",
            "parameters": {
                "type": "object",
                "properties": {"zqkey": {"type": "string", "description": "A key."}},
                "required": ["zqkey"],
            },
        },
    }
]
_ARGUMENTS = {"zqkey": "zqvalue"}
_BROKEN = "zqbroken"
_FILLERS = ("", " ", ".")
"""Texts of messages that only keep the order of turns."""


class TemplateTraits:
    """Traits of one template with one model's tokens."""

    def __init__(self, render: Render, *, names_developer: bool, asks_for_none: bool) -> None:
        """``names_developer``: the source contains the role's name.

        ``asks_for_none``: it detects a message with only calls by content that is None.
        """
        self._render = render
        self._names_developer = names_developer
        self.asks_for_none = asks_for_none

    def learn(self) -> None:
        for kind in KINDS:
            self.takes_parts(kind)
        _ = (self.knows_developer, self.knows_function, self.wraps_invalid, self.turns)

    @cached_property
    def knows_developer(self) -> bool:
        """Return whether ``developer`` is supported, or no system message is shown."""
        if not self._names_developer:
            return False
        rest = _message("user", _SECOND)
        if self._shows([_message("developer", _FIRST), rest], None, _FIRST, _SECOND):
            return True
        return not self._shows([_message("system", _FIRST), rest], None, _FIRST, _SECOND)

    @cached_property
    def knows_function(self) -> bool:
        """Return whether the role ``function`` is supported, or no results are shown."""
        by_function = {**self._result(_FIRST), "role": "function", "name": "zqtool"}
        chat = [_message("user", "zqone"), self._calls()]
        if self._shows([*chat, by_function], _TOOLS, _FIRST):
            return True
        return not self._shows([*chat, self._result(_FIRST)], _TOOLS, _FIRST)

    def takes_parts(self, kind: str) -> bool:
        """Return whether messages of this kind may have parts without loss of text."""
        return self._forms[kind][1]

    def needs_parts(self, kind: str) -> bool:
        """Return whether this kind of message shows text only in parts."""
        return self._forms[kind] == (False, True)

    @cached_property
    def id_form(self) -> IdForm | None:
        """Return the required form of call ids; None if any form is accepted."""
        return self._call_forms[0]

    @cached_property
    def writes_arguments(self) -> bool:
        """Return whether arguments must be JSON in a string."""
        return self._call_forms[1]

    @cached_property
    def wraps_invalid(self) -> bool:
        """Return whether arguments that are no object must be wrapped in one."""
        if self._shows_arguments(_BROKEN):
            return False
        return self._shows_arguments(self._arguments({INVALID: _BROKEN}))

    @cached_property
    def turns(self) -> Turns:
        """Return the repairs of the order of messages, none for unusual templates."""
        turns = Turns()
        usual = [
            _message("user", "zqone"),
            _message("assistant", "zqtwo"),
            _message("user", "zqthree"),
        ]
        if not self._shows(usual, None, *_WORDS[:3]):
            return turns
        if not self._shows_calls(turns) and self._shows_calls(replace(turns, splits_calls=True)):
            turns = replace(turns, splits_calls=True)
        for patterns, repairs in self._rules:
            for repair in repairs:
                repaired = replace(turns, **repair)
                if self._mends(patterns, turns, repaired):
                    turns = repaired
                    break
        return turns

    @cached_property
    def _call_forms(self) -> tuple[IdForm | None, bool]:
        """Return the form of the first accepted call: of ids, and whether arguments are texts."""
        for written, form in product((False, True), FORMS):
            arguments = json.dumps(_ARGUMENTS) if written else _ARGUMENTS
            made = [form.make(each) for each in FOREIGN]
            if form is OURS and all(self._takes_call(each, arguments) for each in FOREIGN):
                fills = not self._takes_call(None, arguments) and self._takes_call(
                    made[0], arguments
                )
                return (OURS if fills else None), written
            if all(self._takes_call(each, arguments) for each in made):
                return form, written
        return None, False

    def _takes_call(self, call_id: str | None, arguments: object) -> bool:
        chat = [_message("user", "zqone"), _call(call_id, arguments, self._no_text)]
        if self._render(chat, _TOOLS) is None:
            return False
        result = {"role": "tool", "content": "zqtwo", "tool_call_id": call_id}
        if call_id is None:
            del result["tool_call_id"]
        return self._render([*chat, result], _TOOLS) is not None

    @property
    def _no_text(self) -> str | None:
        return None if self.asks_for_none else ""

    def _calls(self, text: str | None = None) -> Message:
        content = self._no_text if text is None else text
        return _call(self._call_id, self._arguments(_ARGUMENTS), content)

    def _arguments(self, arguments: Mapping[str, str]) -> object:
        return json.dumps(arguments) if self.writes_arguments else arguments

    def _result(self, text: str) -> Message:
        return {"role": "tool", "content": text, "tool_call_id": self._call_id}

    @cached_property
    def _call_id(self) -> str:
        return (self.id_form or OURS).make("zq")

    def _shows_arguments(self, arguments: object) -> bool:
        chat = [_message("user", "zqone"), _call(self._call_id, arguments, self._no_text)]
        return self._shows(chat, _TOOLS, _BROKEN)

    def _shows_calls(self, turns: Turns) -> bool:
        form = self.id_form or OURS
        calls = self._calls()
        second = _call(form.make("second"), self._arguments({"zqkey": _SECOND}), None)
        calls["tool_calls"] += second["tool_calls"]
        result = {**self._result("zqthree"), "tool_call_id": form.make("second")}
        chat = [_message("user", "zqone"), calls, self._result("zqtwo"), result]
        return self._shows(in_turns(chat, turns), _TOOLS, _SECOND)

    @cached_property
    def _forms(self) -> dict[str, tuple[bool, bool]]:
        """Return, by kind of message, whether its text is shown: as a text, and in parts."""
        parts: Any = [{"type": "text", "text": text, _SHOWN_KEY: 1} for text in (_FIRST, _SECOND)]
        forms: dict[str, tuple[bool, bool]] = {}
        for kind in KINDS:
            is_text = takes_parts = False
            lost = False
            for chat, tools in product(self._chats_with(kind), (None, _TOOLS)):
                as_text = self._shows(_filled(chat, _FIRST), tools, _FIRST)
                as_parts = self._shows(_filled(chat, parts), tools, _FIRST, _SECOND)
                is_text |= as_text
                takes_parts |= as_parts
                lost |= as_text and not as_parts
            forms[kind] = is_text, takes_parts and not lost
        return forms

    def _chats_with(self, kind: str) -> Iterator[list[Message]]:
        """Yield chats with one open content, in every position that the kind may have."""
        user, answer = _message("user", "zqone"), _message("assistant", "zqtwo")
        asks = _message("user", "zqthree")
        if kind in ("system", "developer"):
            yield [_open(kind), user]
            yield [_open(kind), user, answer, asks]
            yield [user, answer, _open(kind), asks]
            yield [user, _open(kind)]
        elif kind == "user":
            yield [_open(kind)]
            yield [_message("system", "zqfour"), _open(kind)]
            yield [_open(kind), answer, asks]
            yield [user, answer, _open(kind)]
        elif kind == "assistant":
            yield [user, _open(kind)]
            yield [user, _open(kind), asks]
        elif kind == CALLS:
            yield [user, {**self._calls(), "content": _OPEN}]
            yield [user, {**self._calls(), "content": _OPEN}, self._result("zqfour")]
        else:
            result = {**self._result(""), "role": kind, "content": _OPEN}
            yield [user, self._calls(), result]
            yield [user, self._calls(), result, answer]

    @cached_property
    def _rules(self) -> list[tuple[list[list[Message]], list[dict[str, Any]]]]:
        """Return orders of messages, with possible repairs. Later rules build on earlier ones."""
        one, two, three, four, five = _WORDS
        user, asks = _message("user", one), _message("user", three)
        called: list[Message] = [_message("user", one), self._calls(), self._result(two)]
        return [
            ([[user, _message("user", two)],
              [user, _message("assistant", two), asks, _message("user", four)]],
             [{"joins_users": True}]),
            ([[user, _message("assistant", two), _message("assistant", three),
               _message("user", four)],
              [user, _message("assistant", two), _message("assistant", three)]],
             [{"joins_assistants": True}]),
            ([[user, _message("assistant", two), self._calls(), self._result(three)]],
             [{"joins_assistants": True}]),
            ([[*called, asks]],
             [{"answers": text} for text in _FILLERS]),
            ([[*called, _message("assistant", three), _message("user", four), self._calls(),
               _message("user", five)]],
             [{"answers": text} for text in _FILLERS]),
            ([[_message("assistant", one), _message("user", two)]],
             [{"asks": text} for text in _FILLERS]),
            ([[user, {**self._result(two), "tool_call_id": (self.id_form or OURS).make("lone")}]],
             [{"frees_results": True}]),
            ([[_message("system", one), _message("system", two), asks]],
             [{"joins_systems": True}]),
            ([[user, _message("assistant", two), _message("system", three), _message("user", four)],
              [user, _message("system", two)],
              [user, _message("assistant", two), _message("system", three)],
              [*called, _message("system", three)],
              [_message("system", one), _message("user", two), _message("assistant", three),
               _message("system", four), _message("user", five)]],
             [{"moves_later_systems": True}, {"moves_later_systems": True, "joins_users": True}]),
            ([[_message("system", four), *called]],
             [{"needs_user_last": True}]),
            ([[_message("system", one), _message("user", two)],
              [_message("system", one), _message("user", two), _message("assistant", three),
               _message("user", four)]],
             [{"has_no_system": True}, {"has_no_system": True, "joins_users": True}]),
        ]  # fmt: skip

    def _mends(self, patterns: Sequence[Sequence[Message]], turns: Turns, repaired: Turns) -> bool:
        """Return whether a repair shows text that was not shown, and keeps all that was."""
        mended = False
        for pattern, tools in product(patterns, (None, _TOOLS)):
            before = self._shows_all(pattern, in_turns(pattern, turns), tools)
            after = self._shows_all(pattern, in_turns(pattern, repaired), tools)
            if before and not after:
                return False
            mended |= after and not before
        return mended

    def _shows_all(
        self,
        chat: Sequence[Message],
        fitted: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> bool:
        texts = [each["content"] for each in chat if each["role"] != "system" and each["content"]]
        system = [each["content"] for each in chat if each["role"] == "system"]
        return self._shows(fitted, tools, *texts) and all(
            self._shows(fitted, tools, each) for each in system
        )

    def _shows(
        self, chat: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *texts: str
    ) -> bool:
        prompt = self._render(chat, tools)
        if prompt is None or _SHOWN_KEY in prompt:
            return False
        at = 0
        for text in texts:
            at = prompt.find(text, at)
            if at < 0:
                return False
            at += len(text)
        return True


_OPEN = object()


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _open(role: str) -> Message:
    return {"role": role, "content": _OPEN}


def _filled(chat: Sequence[Message], content: object) -> list[Message]:
    return [
        {**each, "content": content} if each["content"] is _OPEN else dict(each) for each in chat
    ]


def _call(call_id: str | None, arguments: object, text: str | None) -> Message:
    call: Message = {"type": "function", "function": {"name": "zqtool", "arguments": arguments}}
    if call_id is not None:
        call = {"id": call_id, **call}
    return {"role": "assistant", "content": text, "tool_calls": [call]}
