"""Incremental reader of a chat's answer, choice by choice, for all APIs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.llm.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.outputs import FinishReason
from tandem.router.api.openai.bodies.schemas import ChatBody
from tandem.router.api.openai.bodies.tools import is_forced, is_named
from tandem.router.api.openai.strict_calls import check_strict, strict_form
from tandem.text.parsers.engine import StreamParser
from tandem.text.parsers.events import (
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from tandem.text.parsers.model import ModelParsers

MAX_CALLS = 128


@dataclass(slots=True)
class ReadChoice:
    """One choice: parser and progress."""

    parser: StreamParser
    is_named: bool = False
    """Whether the request names the one call: its end is not reported (OpenAI: stop)."""
    num_calls: int = 0
    last: CompletionOutput | None = None

    @property
    def finish(self) -> str | None:
        """Return the finish reason in OpenAI's terms."""
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
        """Sampling parameters that restrict the answer to its strict tools."""

    @property
    def num_reasoning(self) -> int | None:
        """Return the tokens of reasoning; None if reasoning is not parsed."""
        return None if self._parsers.reasoning is None else self._num_reasoning

    def choice(self, index: int) -> ReadChoice:
        return self._read[index]

    def read(self, output: RequestOutput, choice: CompletionOutput) -> list[Event]:
        """Return the events of the next part of a choice."""
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
    """Raise InvalidParameter for tools that are malformed or cannot be parsed or enforced."""
    tools = tools_of(body)
    if is_forced(body.tool_choice):
        return
    if tools and parsers.tools is None:
        allowed = '[], or any with tool_choice "none": this model\'s format of calls is not known; '
        raise InvalidParameter("tools", body.tools, allowed + "see --tool-call-parser")
    check_strict(body, parsers.tools)


@dataclass(slots=True)
class KeptChoice:
    """Output of a choice that is not streamed."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)
    """Id, name and arguments of each."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None


class ChatReader(AnswerReader):
    """All choices of one request."""

    def __init__(self, body: ChatBody, parsers: ModelParsers) -> None:
        super().__init__(body, parsers)
        self._keeps = not body.stream
        self.choices: dict[int, KeptChoice] = {}

    def take(self, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """Return the next ``delta`` of a choice."""
        events = self.read(output, choice)
        kept = self.choices.setdefault(choice.index, KeptChoice()) if self._keeps else None
        if kept is not None:
            kept.token_ids += choice.token_ids
            if choice.logprobs is not None:
                kept.logprobs = [] if kept.logprobs is None else kept.logprobs
                kept.logprobs += choice.logprobs
        return self._delta(kept, events)

    def message(self, kept: KeptChoice, echoed: str) -> dict[str, Any]:
        """Return the message of an ended choice."""
        content = echoed + "".join(kept.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._says_reasoning:
            reasoning = "".join(kept.reasoning) or None
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if kept.calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": "".join(arguments)},
                }
                for call_id, name, arguments in kept.calls
            ]
        return message

    def _delta(self, kept: KeptChoice | None, events: Iterable[Event]) -> dict[str, Any]:
        content, reasoning = "", ""
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            match event:
                case ContentDelta(text):
                    content += text
                case ReasoningDelta(text):
                    reasoning += text
                case CallBegun(index, call_id, name):
                    function = {"name": name, "arguments": ""}
                    begun = {"index": index, "id": call_id, "type": "function"}
                    calls[index] = {**begun, "function": function}
                    if kept is not None:
                        kept.calls.append((call_id, name, []))
                case ArgumentsDelta(index, text):
                    more = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    more["function"]["arguments"] += text
                    if kept is not None:
                        kept.calls[-1][2].append(text)
        if kept is not None:
            kept.content.append(content)
            kept.reasoning.append(reasoning)
        delta: dict[str, Any] = {}
        if reasoning:
            delta = {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            delta["tool_calls"] = list(calls.values())
        if content or not delta:
            delta["content"] = content
        return delta


def reader_of(body: ChatBody, parsers: ModelParsers) -> ChatReader | None:
    """Return the reader of the answer; None if all of it is content.

    Raises InvalidParameter for tools that cannot be parsed or enforced.
    """
    check_calls(body, parsers)
    reads = is_forced(body.tool_choice) or tools_of(body) or parsers.reasoning is not None
    return ChatReader(body, parsers) if reads else None
