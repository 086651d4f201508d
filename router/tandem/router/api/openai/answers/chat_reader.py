"""A chat's answer split into content, reasoning and calls of tools, in OpenAI's shapes.

One ``ChatReader`` per request reads the deltas of all its choices, for streams and for whole
answers: both have the same content.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tandem.llm.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from tandem.router.api.openai.answers.answer_reader import AnswerReader, check_calls, tools_of
from tandem.router.api.openai.bodies.schemas import ChatBody
from tandem.router.api.openai.bodies.tools import is_forced
from tandem.text.parsers.events import (
    ArgumentsDelta,
    CallBegun,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from tandem.text.parsers.model import ModelParsers


@dataclass(slots=True)
class KeptChoice:
    """Accumulated output of a choice that is not streamed."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)
    """Id, name, arguments."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None


class ChatReader(AnswerReader):
    """All choices of one request."""

    def __init__(self, body: ChatBody, parsers: ModelParsers) -> None:
        super().__init__(body, parsers)
        self._keeps = not body.stream
        self.choices: dict[int, KeptChoice] = {}

    def take(self, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """Return the next delta of a choice, as a chunk's ``delta`` has it."""
        events = self.read(output, choice)
        kept = self.choices.setdefault(choice.index, KeptChoice()) if self._keeps else None
        if kept is not None:
            kept.token_ids += choice.token_ids
            if choice.logprobs is not None:
                kept.logprobs = [] if kept.logprobs is None else kept.logprobs
                kept.logprobs += choice.logprobs
        return self._delta(kept, events)

    def message(self, kept: KeptChoice, echoed: str) -> dict[str, Any]:
        """Return the whole message of a choice that has ended."""
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

    Raises InvalidParameter for tools whose calls no parser would find, or that nothing could keep
    to a strict schema.
    """
    check_calls(body, parsers)
    reads = is_forced(body.tool_choice) or tools_of(body) or parsers.reasoning is not None
    return ChatReader(body, parsers) if reads else None
