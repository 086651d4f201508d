"""Every format: what was meant is what is read, however the text is cut."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.text.parser_streams import THOUGHTS, TOOLS, WRITERS, meanings

from tandem.text.parsers.calls import ToolSchemas
from tandem.text.parsers.cursor import MAX_HELD, MAX_NAME
from tandem.text.parsers.engine import StreamParser
from tandem.text.parsers.events import (
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from tandem.text.parsers.formats import HARMONY, REASONING_FORMATS, TOOL_FORMATS
from tandem.text.parsers.tables import CallText, ToolFormat

SCHEMAS = ToolSchemas.of(TOOLS)
PAIRS = {
    "hermes": "qwen3",
    "qwen3_xml": "qwen3",
    "qwen3_coder": "qwen3",
    "nemotron_json": "qwen3",
    "seed_oss": "seed_oss",
    "granite": "qwen3",
    "glm45": "glm45",
    "minimax_m2": "minimax_m2",
    "mistral": "mistral",
    "mistral_json": "mistral",
    "gemma4": "gemma4",
    "kimi_k2": "kimi_k2",
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_r1",
    "llama3_json": "deepseek_r1",
}


@dataclass
class Said:
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Id, name and arguments."""
    open: int = 0

    def take(self, events: Iterable[Event]) -> Said:
        """Write the events down, and check their order."""
        for event in events:
            match event:
                case ContentDelta(text):
                    self.content += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case CallBegun(index, call_id, name):
                    assert index == len(self.calls)
                    self.calls.append([call_id, name, ""])
                    self.open += 1
                case ArgumentsDelta(index, text):
                    assert index == len(self.calls) - 1
                    self.calls[-1][2] += text
                case CallEnded(index):
                    assert index == len(self.calls) - 1
                    self.open -= 1
        return self

    @property
    def meant(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for _, name, arguments in self.calls]


def parser(tools: str | None, reasoning: str | None = None, prompt: str = "") -> StreamParser:
    ids = itertools.count()
    return StreamParser(
        tools=TOOL_FORMATS[tools] if tools else None,
        reasoning=REASONING_FORMATS[reasoning] if reasoning else None,
        schemas=SCHEMAS,
        prompt=prompt,
        new_id=lambda: f"id{next(ids)}",
    )


def read(
    pieces: Sequence[str], tools: str | None, reasoning: str | None = None, prompt: str = ""
) -> Said:
    """All that is told of a text in pieces."""
    stream, said = parser(tools, reasoning, prompt), Said()
    for piece in pieces:
        said.take(stream.feed(piece))
    said.take(stream.end())
    assert said.open == 0
    return said


def check_cuts(
    text: str, tools: str | None, reasoning: str | None = None, cut: slice = slice(1, None)
) -> Said:
    """The same, cut at every place (or those of ``cut``), and into single characters, of which no
    more wait than a mark or a name has."""
    whole = read([text], tools, reasoning)
    for at in range(len(text))[cut]:
        assert read([text[:at], text[at:]], tools, reasoning) == whole, (at, text)
    stream, said = parser(tools, reasoning), Said()
    for char in text:
        said.take(stream.feed(char))
        assert len(stream.cursor.text) - stream.cursor.pos <= MAX_NAME, (said, text)
    assert said.take(stream.end()) == whole
    return whole


STREAMS = [10, pytest.param(200, marks=pytest.mark.nightly)]
SEEN_THROUGH = 4
"""Streams that are cut at every place; of the others, each is cut at one place in thirteen."""


def places(number: int, streams: int) -> slice:
    if number < SEEN_THROUGH or streams > 10:
        return slice(1, None)
    return slice(1 + number % 13, None, 13)


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("name", WRITERS)
def test_what_was_meant_is_read_however_it_is_cut(name: str, streams: int) -> None:
    """Streams of each format: text and calls with arguments of all types."""
    tail_names = ("get_weather", "f") if name == "pythonic" else ("get_weather", "f", "a.b-c")
    for number, (text, calls) in enumerate(meanings(7, streams, tail_names=tail_names)):
        said = check_cuts(WRITERS[name](text, calls), name, cut=places(number, streams))

        assert said.meant == calls
        wanted = "" if calls and name in ("llama3_json", "pythonic") else text
        assert said.content == wanted


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("name", PAIRS)
def test_thoughts_and_calls_are_told_apart_in_one_pass(name: str, streams: int) -> None:
    """Streams of each pair: a thought goes before, with text in it that looks like marks."""
    thought, reasoning = "Is <thin or [THIN or <|chan a mark? No", PAIRS[name]
    tail_names = ("get_weather", "f")
    for number, (text, calls) in enumerate(meanings(11, streams, tail_names=tail_names)):
        written = THOUGHTS[reasoning] % thought + WRITERS[name](text, calls)
        said = check_cuts(written, name, reasoning, places(number, streams))

        assert said.reasoning == thought
        assert said.meant == calls


AWKWARD = [
    ("hermes", "<tool_call>no</tool_call>", "<tool_call>no</tool_call>", []),
    ("hermes", "<tool_call", "<tool_call", []),
    ("hermes", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    ("hermes", '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
    ("hermes", '<tool_call><tool_call>{"name": "f"}', "<tool_call>", [("f", {})]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"} ', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}', "", [("f", {})]),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{"a":"x\ny\\d"}}',
        "",
        [("f", {"a": "x\ny\\d"})],
    ),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[f(text='a)', sure=true)]", "", [("f", {"text": "a)", "sure": True})]),
    ("pythonic", "[f(__import__('os'))]", "[f(__import__('os'))]", []),
    ("qwen3_xml", "<tool_call>\nhm</tool_call>", "<tool_call>\nhm</tool_call>", []),
    ("qwen3_xml", "<function=f>\n</function>\n</tool_call>", "", [("f", {})]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', "", [("f", {"a": 1})]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [("f", {"a": 1})]),
    ("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    ("glm45", "<tool_call>f</tool_call>", "", [("f", {})]),
    ("openai", "plain words", "plain words", []),
    ("openai", "<|channel|>final<|message|>Hi<|return|>", "Hi", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), AWKWARD)
def test_awkward_texts(name: str, text: str, content: str, calls: list[Any]) -> None:
    """What is no call is content, letter by letter; what nearly is one is read."""
    said = check_cuts(text, name)

    assert said.content == content
    assert said.meant == calls


def test_harmony_has_channels_and_parallel_calls() -> None:
    """analysis is reasoning, commentary for a function a call, the rest content."""
    text = (
        "<|channel|>analysis<|message|>hm<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}'
        "<|call|><|start|>assistant to=functions.get_weather<|channel|>commentary<|message|>{}"
        "<|call|><|start|>assistant<|channel|>final<|message|>Done"
    )
    said = check_cuts(text, "openai", "openai_gptoss")

    assert said.reasoning == "hm"
    assert said.meant == [("f", {"a": 1}), ("get_weather", {})]
    assert said.content == "Done"


def test_arguments_come_as_they_are_written() -> None:
    """A client sees the beginning of an argument before its end is there, and content at once."""
    stream = parser("hermes")

    assert stream.feed("Hello") == [ContentDelta("Hello")]
    events = stream.feed(' <tool_call>{"name": "f", "arguments": {"text": "Par')
    assert events[-1] == ArgumentsDelta(0, '{"text": "Par')
    assert stream.feed("is") == [ArgumentsDelta(0, "is")]
    stream.feed('"}}</tool_call>')
    assert stream.feed("\n\nBye") == [ContentDelta("Bye")]


def test_what_waits_is_bounded() -> None:
    """A call whose name never comes is content once too much of it waits."""
    stream, said = parser("hermes"), Said()
    said.take(stream.feed('<tool_call>{"arguments": {"text": "'))
    for _ in range(MAX_HELD // 100 + 2):
        said.take(stream.feed("x" * 100))
        assert len(stream.cursor.text) <= MAX_HELD + 200

    assert len(said.content) >= MAX_HELD
    assert said.calls == []


LONG_WORDS = 'He said "no", and\nwent <home> ' * 900
LONG_LIST = json.dumps(list(range(6_000)))


@pytest.mark.parametrize(
    ("schema", "written", "meant"),
    [
        ({"type": "string"}, LONG_WORDS, LONG_WORDS),
        ({"type": ["string", "null"]}, LONG_WORDS, LONG_WORDS),
        ({}, LONG_WORDS, LONG_WORDS),
        ({"type": "integer"}, LONG_WORDS, LONG_WORDS),
        ({"type": "array"}, LONG_LIST, list(range(6_000))),
    ],
)
def test_a_value_of_any_length_is_whole(schema: Any, written: str, meant: Any) -> None:
    """Beyond what is held until its type is known: nothing is cut off or left over as content."""
    assert len(written) > MAX_HELD
    function = {"name": "f", "parameters": {"properties": {"x": schema}}}
    text = f"<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function></tool_call>"
    stream = StreamParser(
        tools=TOOL_FORMATS["qwen3_xml"],
        schemas=ToolSchemas.of([{"type": "function", "function": function}]),
    )
    said = Said()
    for at in range(0, len(text), 700):
        said.take(stream.feed(text[at : at + 700]))
    said.take(stream.end())

    assert said.meant == [("f", {"x": meant})]
    assert said.content == ""


@pytest.mark.parametrize("written", ['{{"a": 1}}', "{[1]: 2}", "[{{}: 1}]"])
@pytest.mark.parametrize("schema", [{}, {"type": "object"}])
def test_a_value_that_hashes_what_has_no_hash_is_a_text(schema: Any, written: str) -> None:
    """Python's syntax has sets and keys of anything; no value can be made of these."""
    function = {"name": "f", "parameters": {"properties": {"x": schema}}}
    stream = StreamParser(
        tools=TOOL_FORMATS["qwen3_xml"],
        schemas=ToolSchemas.of([{"type": "function", "function": function}]),
    )
    said = Said()
    said.take(stream.feed(f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n"))
    said.take(stream.feed("</function>\n</tool_call>"))
    said.take(stream.end())

    assert said.meant == [("f", {"x": written})]


PIECES = [mark for f in (*TOOL_FORMATS.values(), *REASONING_FORMATS.values()) for mark in f.marks]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_no_text_raises_or_is_read_differently_in_pieces(name: str) -> None:
    """Marks of all formats, names and JSON in any order."""
    draw = random.Random(name)
    own = list(TOOL_FORMATS[name].marks)
    others = [
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        ",",
        "f",
        "(",
        ")",
        "'",
        "\\",
        "\n",
        " ",
        "=",
        "1",
        "😀",
    ]
    others += ['{"name": "f", "arguments": ', '{"a": [1, 2', "functions.f:0", "call:f{", "f(a="]
    reasoning = "openai_gptoss" if name == "openai" else draw.choice(sorted(THOUGHTS))
    for _ in range(300):
        pieces = [
            draw.choice(draw.choice((own, others, PIECES))) for _ in range(draw.randrange(25))
        ]
        whole = read(["".join(pieces)], name, reasoning)

        assert read(pieces, name, reasoning) == whole, pieces
        assert read(list("".join(pieces)), name, reasoning) == whole, pieces


def written_call(text: CallText, name: str) -> str:
    """Return a call of ``name`` with a text and a list, as a grammar of ``text`` holds it."""
    values = {"a": '"} x"', "b": "[1]"}
    if text.parameters is not None:
        each = text.parameters
        arguments = "".join(
            each.begin.replace("{key}", key) + json.loads(f"[{value}]")[0] + each.pad + each.end
            if key == "a"
            else each.after + each.begin.replace("{key}", key) + value + each.pad + each.end
            for key, value in values.items()
        )
        arguments += each.after
    elif text.literals is not None:
        literals = text.literals
        if literals.quote:
            values["a"] = f"{literals.quote}}} x{literals.quote}"
        arguments = literals.separator.join(
            literals.key.replace("{key}", key) + value for key, value in values.items()
        )
    else:
        arguments = ",".join(f'"{key}":{value}' for key, value in values.items()).join("{}")
    number = f"0{text.after_number}" if text.after_number else ""
    return "".join((text.begin, *text.head)).replace("{name}", name) + number + arguments + text.end


@pytest.mark.parametrize("name", [name for name, f in TOOL_FORMATS.items() if f is not HARMONY])
def test_calls_that_a_grammar_writes_are_read(name: str) -> None:
    """A parser reads what the grammar of strict tools of its own format lets a model write."""
    table = TOOL_FORMATS[name]
    assert isinstance(table, ToolFormat)
    for text in table.texts:
        assert text.begin.startswith(text.trigger)
        call = written_call(text, "get_weather")
        if table.start is None:
            assert text.trigger in table.opens
            said = check_cuts(f"Well. {call}{call}", name)
            assert said.content == "Well. "
        else:
            calls = call + table.start.separator + call
            said = check_cuts(table.start.open + calls + table.start.close, name)
            assert said.content == ""

        assert said.meant == [("get_weather", {"a": "} x", "b": [1]})] * 2
