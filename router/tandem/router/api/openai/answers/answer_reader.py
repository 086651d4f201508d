"""Incremental reader of a chat's answer: its events, choice by choice, independent of the API.

Chats, responses and messages all use it, so that they find the same reasoning and the same calls in
one text, and end for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.llm.outputs import CompletionOutput, RequestOutput
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.outputs import FinishReason
from tandem.router.api.openai.bodies.schemas import ChatBody
from tandem.router.api.openai.bodies.tools import is_forced, is_named
from tandem.router.api.openai.strict_calls import check_strict, strict_form
from tandem.text.parsers.engine import StreamParser
from tandem.text.parsers.events import ArgumentsDelta, CallBegun, CallEnded, Event, ReasoningDelta
from tandem.text.parsers.model import ModelParsers

MAX_CALLS = 128
"""Calls of one choice that are sent; a model that repeats itself makes no more."""


@dataclass(slots=True)
class ReadChoice:
    """One choice: its parser and its progress."""

    parser: StreamParser
    is_named: bool = False
    """Set if the one call was requested by name: its end is not reported (OpenAI: stop)."""
    num_calls: int = 0
    last: CompletionOutput | None = None

    @property
    def finish(self) -> str | None:
        """Return the reason for the end, in the terms of OpenAI's chats."""
        reason = None if self.last is None else self.last.finish_reason
        called = self.num_calls > 0 and not self.is_named
        return "tool_calls" if reason is FinishReason.STOP and called else reason


class AnswerReader:
    """All choices of one request."""

    def __init__(self, body: ChatBody, parsers: ModelParsers) -> None:
        self._parsers = parsers
        self._tools = tools_of(body)
        self._is_forced, self._is_named = is_forced(body.tool_choice), is_named(body.tool_choice)
        self._says_reasoning = parsers.reasoning is not None and body.include_reasoning is not False
        self._continued = body.continued
        self._most_calls = 1 if body.parallel_tool_calls is False else MAX_CALLS
        self._read: dict[int, ReadChoice] = {}
        self._num_reasoning = 0
        self.form = {} if self._is_forced else strict_form(body, parsers.tools)
        """Sampling parameters by which a grammar keeps the answer to its strict tools."""

    @property
    def num_reasoning(self) -> int | None:
        """Return the tokens of reasoning so far; None if reasoning is not parsed."""
        return None if self._parsers.reasoning is None else self._num_reasoning

    def choice(self, index: int) -> ReadChoice:
        """Return a choice that was read in part."""
        return self._read[index]

    def read(self, output: RequestOutput, choice: CompletionOutput) -> list[Event]:
        """Return the events to send for the next part of a choice."""
        read = self._read.get(choice.index)
        if read is None:
            read = self._read[choice.index] = ReadChoice(self._parser(output), self._is_named)
        if read.parser.thinks:
            self._num_reasoning += len(choice.token_ids)
        events = read.parser.feed(choice.text)
        if choice.finish_reason is not None:
            events += read.parser.end()
        read.last = choice
        told = [event for event in events if self._is_told(event)]
        read.num_calls += sum(isinstance(event, CallBegun) for event in told)
        return told

    def _parser(self, output: RequestOutput) -> StreamParser:
        begin = self._parsers.begin_forced if self._is_forced else self._parsers.begin
        return begin(self._tools, output.prompt or "", self._continued)

    def _is_told(self, event: Event) -> bool:
        match event:
            case ReasoningDelta():
                return self._says_reasoning
            case CallBegun(index) | ArgumentsDelta(index) | CallEnded(index):
                return index < self._most_calls
        return True


def tools_of(body: ChatBody) -> Sequence[dict[str, Any]]:
    """Return the tools that an answer may call."""
    return () if body.tool_choice == "none" else body.tools or ()


def check_calls(body: ChatBody, parsers: ModelParsers) -> None:
    """Raise InvalidParameter for malformed tools, those whose calls no parser would find, or that
    nothing could keep to a strict schema."""
    tools = tools_of(body)
    if is_forced(body.tool_choice):
        return
    if tools and parsers.tools is None:
        allowed = '[], or any with tool_choice "none": this model\'s format of calls is not known; '
        raise InvalidParameter("tools", body.tools, allowed + "see --tool-call-parser")
    check_strict(body, parsers.tools)
