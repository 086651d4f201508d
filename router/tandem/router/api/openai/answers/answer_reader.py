"""Incremental reader of a chat's answer, choice by choice, for all APIs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.json import decode

from tandem.llm.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.outputs import FinishReason
from tandem.protocol.structured import MAX_SCHEMA_BYTES, MAX_TAG_ELEMENTS
from tandem.router.api.openai.bodies.schemas import ChatBody
from tandem.router.api.openai.bodies.tools import is_forced, is_named
from tandem.router.api.openai.strict_literals import elements_of, literals_form
from tandem.router.api.openai.strict_parameters import NotFollowed, TooLong, parameters_form
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
from tandem.text.parsers.tables import (
    CallText,
    ChannelFormat,
    StartText,
    ToolFormat,
)

Form = dict[str, Any]
Tag = msgspec.Raw
"""Tag in JSON, which is encoded once."""
NOTHING: Form = {"type": "const_string", "value": ""}
_BLANKS: Form = {"type": "regex", "pattern": r"[ \t\r\n]{0,8}"}


def copies_of(format_: ToolFormat | ChannelFormat) -> int:
    """Return the number of copies of each tag in the form."""
    start = format_.start if isinstance(format_, ToolFormat) else None
    return 1 if start is None else 1 + len(start.marks)


def whole_form(
    format_: ToolFormat | ChannelFormat,
    tags: Sequence[Tag],
    *,
    parallel: bool,
    words: Form | None = None,
) -> Form:
    """Return the form of answers with the calls of ``tags``.

    ``words``: the form of an answer without calls; None for any text.
    """
    if isinstance(format_, ChannelFormat):
        return _of_messages(format_, tags, words or {"type": "any_text"})
    if words is not None:
        return _or(_calls_alone(format_, tags, parallel=parallel), words)
    if format_.start is not None:
        return _from_start(format_.start, tags, parallel=parallel)
    return {
        "type": "triggered_tags",
        "triggers": [each.trigger for each in format_.texts],
        "tags": [*tags],
        "stop_after_first": not parallel,
    }


def _calls_alone(format_: ToolFormat, tags: Sequence[Tag], *, parallel: bool) -> Form:
    if format_.start is not None:
        return _begun(format_.start, tags, parallel=parallel)
    return {
        "type": "tags_with_separator",
        "tags": [*tags],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _begun(start: StartText, tags: Sequence[Tag], *, parallel: bool) -> Form:
    marks = [_const(mark) for mark, _ in start.marks]
    closers = [_const(closer) for _, closer in start.marks if closer]
    region = _region(start, tags, parallel=parallel)
    return _sequence(_BLANKS, _or(NOTHING, *marks), region, _or(NOTHING, *closers))


def _region(start: StartText, tags: Sequence[Tag], *, parallel: bool) -> Form:
    calls = {
        "type": "tags_with_separator",
        "tags": [*tags],
        "separator": start.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return _sequence(_const(start.open), calls, _const(start.close))


def _from_start(start: StartText, tags: Sequence[Tag], *, parallel: bool) -> Form:
    begun = _begun(start, tags, parallel=parallel)
    region = _region(start, tags, parallel=parallel)
    marked = [
        {"begin": mark, "content": region, "end": closer or ""} for mark, closer in start.marks
    ]
    words = {
        "type": "triggered_tags",
        "triggers": [mark for mark, _ in start.marks],
        "tags": marked,
        "stop_after_first": not parallel,
    }
    # Grammars read tokens independently: both ways begin with the same text.
    starts = [_sequence(_const(text), _regex(pattern)) for text, pattern in start.words]
    return _or(begun, _sequence(_BLANKS, _or(*starts), words), NOTHING)


def _of_messages(format_: ChannelFormat, tags: Sequence[Tag], words: Form) -> Form:
    spoken = [
        {
            "begin": f"{format_.channel}{channel}{format_.message}",
            "content": {"type": "any_text"},
            "end": format_.end,
        }
        for channel in ("analysis", "commentary")
    ]
    next_message = f"{format_.start}assistant"
    before = {
        "type": "tags_with_separator",
        "tags": spoken,
        "separator": next_message,
        "at_least_one": True,
    }
    call = {
        "type": "tags_with_separator",
        "tags": [*tags],
        "separator": "",
        "at_least_one": True,
        "stop_after_first": True,
    }
    final = _const(f"{format_.channel}final{format_.message}")
    last = _or(call, _sequence(final, words))
    return _sequence(_or(NOTHING, _sequence(before, _const(next_message))), last)


def _regex(pattern: str) -> Form:
    return {"type": "regex", "pattern": pattern}


def _const(value: str) -> Form:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": [each for each in elements if each != NOTHING]}


def _or(*elements: Form) -> Form:
    return {"type": "or", "elements": [*elements]}


_FRAME_BYTES = 4_096
_FRAME_ELEMENTS = 64
"""Maximum elements of a form besides its tags."""
BEST_EFFORT = "tools.strict"
"""Name of the hint for a tool whose schema is not enforced."""
Format = ToolFormat | ChannelFormat | None


def check_strict(body: ChatBody, format_: Format) -> None:
    """Make the form of strict tools for ``strict_form``, and note tools without one.

    With a ``response_format`` the answer is calls or has that form. Raises InvalidParameter for
    schemas that are too large.
    """
    body.held_form = {}
    tools = _tools(body)
    strict = [index for index, tool in enumerate(tools) if _is_strict(tool)]
    _check_sizes(body, strict)
    words = _words_of(body) if tools else None
    loose, tags = list(strict), list[msgspec.Raw]()
    if (strict or words) and format_ is not None and not _is_taken(body, words):
        functions = [tool["function"] for tool in tools]
        loose, tags = _Tags(format_, words).of(functions, strict)
    if loose:
        body.ignore(BEST_EFFORT)
    if format_ is None or not tags or (len(loose) == len(strict) and not words):
        return
    parallel = body.parallel_tool_calls is not False
    form = whole_form(format_, tags, parallel=parallel, words=words)
    tag = msgspec.json.encode({"type": "structural_tag", "format": form}).decode()
    body.held_form = {"structured_outputs": {"structural_tag": tag, "disable_any_whitespace": True}}


def strict_form(body: ChatBody, format_: Format) -> dict[str, Any]:
    """Return the sampling parameter for strict tools, or {}. Raises InvalidParameter."""
    if body.held_form is None:
        check_strict(body, format_)
    return body.held_form or {}


def _check_sizes(body: ChatBody, strict: Sequence[int]) -> None:
    """Raise InvalidParameter for schemas that are too large, before any is taken apart."""
    num_bytes = 0
    for index in strict:
        place = body.tool_place(index)
        schema = _tools(body)[index]["function"].get("parameters")
        size = len(msgspec.json.encode(schema))
        if size > MAX_SCHEMA_BYTES:
            allowed = f"a schema of at most {MAX_SCHEMA_BYTES:,} bytes, or strict: false"
            raise InvalidParameter(f"tools[{place}].function.parameters", schema, allowed)
        num_bytes += size
        if num_bytes > MAX_SCHEMA_BYTES:
            allowed = (
                f"strict tools with schemas of at most {MAX_SCHEMA_BYTES:,} bytes together; "
                f"up to tools[{place}] they have {num_bytes:,}"
            )
            raise InvalidParameter("tools", body.tools, allowed)


def _words_of(body: ChatBody) -> dict[str, Any] | None:
    wanted = body.response_format
    if wanted is None or wanted.type not in ("json_schema", "json_object"):
        return None
    schema = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema_
    return {"type": "json_schema", "json_schema": schema}


def _is_taken(body: ChatBody, words: object) -> bool:
    has_form = words is None and "structured_outputs" in body.sampling()
    return has_form or bool(body.continue_final_message)


class _Tags:
    """Tags of calls in one format, within the bounds of a structural tag."""

    def __init__(self, format_: ToolFormat | ChannelFormat, words: dict[str, Any] | None) -> None:
        """``words``: the form of an answer without calls."""
        self._format = format_
        self._copies = copies_of(format_)
        size = len(msgspec.json.encode(words))
        self._room = (MAX_SCHEMA_BYTES - _FRAME_BYTES - size) // self._copies
        self._elements = (MAX_TAG_ELEMENTS - _FRAME_ELEMENTS) // self._copies

    def of(
        self, functions: Sequence[Mapping[str, Any]], strict: Sequence[int]
    ) -> tuple[list[int], list[msgspec.Raw]]:
        """Return the tools of ``strict`` that no grammar can keep, and the tags of all tools; no
        tags if all of them together are too many."""
        anything = [self._loose_tags(each) for each in functions]
        for each in anything:
            self._take(each)
        loose: list[int] = []
        tags: list[msgspec.Raw] = []
        for index, function in enumerate(functions):
            made = anything[index]
            if index in strict:
                held = self._held_tags(function)
                loose += [index] if held is None else []
                made = held or made
            tags += made
        return ([*strict], []) if self._room < 0 or self._elements < 0 else (loose, tags)

    def _take(self, tags: Sequence[msgspec.Raw]) -> None:
        self._room -= sum(map(len, tags))
        self._elements -= sum(map(elements_of, map(decode, tags)))

    def _held_tags(self, function: Mapping[str, Any]) -> list[msgspec.Raw] | None:
        before = self._room, self._elements
        try:
            made: list[msgspec.Raw] = []
            for text in self._format.texts:
                tag = _tag(function, text, self._room, is_strict=True)
                made.append(msgspec.Raw(msgspec.json.encode(tag)))
                self._take(made[-1:])
                if self._room < 0 or self._elements < 0:
                    raise TooLong
        except (NotFollowed, TooLong):
            self._room, self._elements = before
            return None
        return made

    def _loose_tags(self, function: Mapping[str, Any]) -> list[msgspec.Raw]:
        texts = self._format.texts
        tags = (_tag(function, text, self._room, is_strict=False) for text in texts)
        return [msgspec.Raw(msgspec.json.encode(each)) for each in tags]


def _tag(
    function: Mapping[str, Any], text: CallText, room: int, *, is_strict: bool
) -> dict[str, Any]:
    """Return one way to write a call. Raises NotFollowed, and TooLong beyond ``room`` bytes."""
    content = _content(function, text, room, is_strict=is_strict)
    if text.after_number:
        number = {"type": "regex", "pattern": "[0-9]{1,3}"}
        behind = {"type": "const_string", "value": text.after_number}
        content = {"type": "sequence", "elements": [number, behind, content]}
    if text.head:
        parts = [each.replace("{name}", function["name"]) for each in text.head]
        consts = [{"type": "const_string", "value": each} for each in parts]
        content = {"type": "sequence", "elements": [*consts, content]}
    begin = text.begin.replace("{name}", function["name"])
    return {"begin": begin, "content": content, "end": text.end}


def _content(
    function: Mapping[str, Any], text: CallText, room: int, *, is_strict: bool
) -> dict[str, Any]:
    """Return the form of arguments; any arguments for a tool without a grammar."""
    schema = function.get("parameters") if is_strict else None
    if text.parameters is not None:
        return parameters_form(schema, text.parameters, room) if schema else {"type": "any_text"}
    if text.literals is not None:
        return literals_form(schema, text.literals) if schema else {"type": "any_text"}
    return {"type": "json_schema", "json_schema": schema or {"type": "object"}}


def _tools(body: ChatBody) -> list[dict[str, Any]]:
    return [] if body.tool_choice == "none" else body.tools or []


def _is_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and bool(function.get("strict"))


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
        visible = [event for event in events if self._is_visible(event)]
        read.num_calls += sum(isinstance(event, CallBegun) for event in visible)
        return visible

    def _parser(self, output: RequestOutput) -> StreamParser:
        begin = self._parsers.begin_forced if self._is_forced else self._parsers.begin
        return begin(self._tools, output.prompt or "", self._continued)

    def _is_visible(self, event: Event) -> bool:
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
    """Reader of one chat: deltas of a stream, or whole choices."""

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
