"""A chat's answer told apart: content, reasoning and calls of tools, in OpenAI's shapes.

One ``ChatReader`` per request reads the deltas of all its choices, for streams and for whole
answers: both say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.llm.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.finish import FinishReason
from tandem.router.openai.forced_calls import is_forced, is_named
from tandem.router.openai.schemas import ChatBody
from tandem.router.openai.strict_calls import check_strict, strict_form
from tandem.text.parsers.engine import StreamParser
from tandem.text.parsers.events import (
    ArgumentsDelta,
    CallBegun,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from tandem.text.parsers.model import ModelParsers

MAX_CALLS = 128
"""Calls of one choice that are told; a model that goes round in circles makes no more."""


@dataclass(slots=True)
class ReadChoice:
    """One choice: its parser, and all that it has said when it is not streamed."""

    parser: StreamParser
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)
    """Id, name, arguments."""
    num_calls: int = 0
    is_named: bool = False
    """The one call was asked for by name: its end is no news (OpenAI says stop)."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    last: CompletionOutput | None = None

    @property
    def finish(self) -> str | None:
        """Why it ended, in OpenAI's words."""
        reason = None if self.last is None else self.last.finish_reason
        called = self.num_calls > 0 and not self.is_named
        return "tool_calls" if reason is FinishReason.STOP and called else reason


class ChatReader:
    """All choices of one request."""

    def __init__(self, body: ChatBody, parsers: ModelParsers) -> None:
        self._parsers = parsers
        self._tools = tools_of(body)
        self._is_forced, self._is_named = is_forced(body.tool_choice), is_named(body.tool_choice)
        self._says_reasoning = parsers.reasoning is not None and body.include_reasoning is not False
        self._most_calls = 1 if body.parallel_tool_calls is False else MAX_CALLS
        self._keeps = not body.stream
        self.choices: dict[int, ReadChoice] = {}
        self._num_reasoning = 0
        self.form = {} if self._is_forced else strict_form(body, parsers.tools)
        """Sampling parameters by which a grammar holds the answer to what is to be strict."""

    @property
    def num_reasoning(self) -> int | None:
        """Tokens of reasoning so far; None where reasoning is not looked for."""
        return None if self._parsers.reasoning is None else self._num_reasoning

    def take(self, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """The next delta of a choice, as a chunk's ``delta`` has it."""
        read = self.choices.get(choice.index)
        if read is None:
            begin = self._parsers.begin_forced if self._is_forced else self._parsers.begin
            parser = begin(self._tools, output.prompt or "")
            read = self.choices[choice.index] = ReadChoice(parser, is_named=self._is_named)
        if read.parser.thinks:
            self._num_reasoning += len(choice.token_ids)
        events = read.parser.feed(choice.text)
        if choice.finish_reason is not None:
            events += read.parser.end()
        read.last = choice
        if self._keeps:
            read.token_ids += choice.token_ids
            if choice.logprobs is not None:
                read.logprobs = [*(read.logprobs or ()), *choice.logprobs]
        return self._delta(read, events)

    def message(self, read: ReadChoice, echoed: str) -> dict[str, Any]:
        """The whole message of a choice that has ended."""
        content = echoed + "".join(read.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._says_reasoning:
            reasoning = "".join(read.reasoning) or None
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if read.calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": "".join(arguments)},
                }
                for call_id, name, arguments in read.calls
            ]
        return message

    def _delta(self, read: ReadChoice, events: Iterable[Event]) -> dict[str, Any]:
        content, reasoning = "", ""
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            match event:
                case ContentDelta(text):
                    content += text
                case ReasoningDelta(text) if self._says_reasoning:
                    reasoning += text
                case CallBegun(index, call_id, name) if index < self._most_calls:
                    function = {"name": name, "arguments": ""}
                    begun = {"index": index, "id": call_id, "type": "function"}
                    calls[index] = {**begun, "function": function}
                    read.num_calls += 1
                    if self._keeps:
                        read.calls.append((call_id, name, []))
                case ArgumentsDelta(index, text) if index < self._most_calls:
                    more = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    more["function"]["arguments"] += text
                    if self._keeps:
                        read.calls[-1][2].append(text)
        if self._keeps:
            read.content.append(content)
            read.reasoning.append(reasoning)
        delta: dict[str, Any] = {}
        if reasoning:
            delta = {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            delta["tool_calls"] = list(calls.values())
        if content or not delta:
            delta["content"] = content
        return delta


def tools_of(body: ChatBody) -> Sequence[dict[str, Any]]:
    """The tools that an answer may call."""
    return () if body.tool_choice == "none" else body.tools or ()


def reader_of(body: ChatBody, parsers: ModelParsers) -> ChatReader | None:
    """What reads the answer; None where all of it is content.

    Raises InvalidParameter for tools whose calls nobody would find, or that nothing could hold to
    be strict.
    """
    tools = tools_of(body)
    if is_forced(body.tool_choice):
        return ChatReader(body, parsers)
    if tools and parsers.tools is None:
        allowed = '[], or any with tool_choice "none": this model\'s format of calls is not known; '
        raise InvalidParameter("tools", body.tools, allowed + "see --tool-call-parser")
    check_strict(body, parsers.tools)
    return ChatReader(body, parsers) if tools or parsers.reasoning is not None else None
