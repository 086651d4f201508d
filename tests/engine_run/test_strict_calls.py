"""Calls drawn at random under the grammar of strict tools, read by the format's own parser."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tests.engine_run.grammar_draws import VOCAB, compiled

from tandem.engine.structured.backends.base import Grammar
from tandem.engine.structured.backends.guidance import GuidanceBackend
from tandem.engine.structured.constraint import make_mask
from tandem.engine.structured.errors import GrammarError
from tandem.router.api.openai.answers.answer_reader import check_strict, strict_form
from tandem.router.api.openai.bodies.schemas import ChatBody
from tandem.router.api.openai.strict_parameters import NotFollowed, parameters_form
from tandem.text.parsers.calls import ToolSchemas
from tandem.text.parsers.engine import StreamParser
from tandem.text.parsers.events import ArgumentsDelta, CallBegun
from tandem.text.parsers.formats import TOOL_FORMATS
from tandem.text.parsers.tables import ChannelFormat, ToolFormat
from tandem.text.tokenizer import Tokenizer

pytestmark = pytest.mark.full

HELD = [
    name
    for name, each in TOOL_FORMATS.items()
    if isinstance(each, ToolFormat) and each.start is None
]
OTHERS = [name for name in TOOL_FORMATS if name not in HELD]
"""Formats without a mark, and of messages."""
DRAWS = 12
MOST_TOKENS = 500
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F", "none"]},
        "count": {"type": "integer", "minimum": 3, "maximum": 99},
        "short": {"type": "string", "minLength": 2, "maxLength": 6},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["text", "unit", "count", "short", "place"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "now", "parameters": EMPTY, "strict": True}},
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="module")
def compiler(smollm2: Path) -> GuidanceBackend:
    return GuidanceBackend(smollm2, VOCAB)


def chat(**fields: Any) -> ChatBody:
    words = {"role": "user", "content": "Hi"}
    return ChatBody.model_validate({"messages": [words], "tools": TOOLS} | fields)


def draw(grammar: Grammar, tokenizer: Tokenizer, closers: list[list[int]], seed: int) -> str | None:
    """A text of random allowed tokens, into which what closes something is thrown now and then;
    None if it did not end in time."""
    rng, ids = random.Random(seed), list[int]()
    while len(ids) < MOST_TOKENS and not grammar.is_terminated:
        if grammar.is_accepting and rng.random() < 0.5:
            break
        if rng.random() < 0.3:
            thrown = rng.choice(closers)
            try:
                grammar.copy().accept(thrown)
            except GrammarError:
                continue
            grammar.accept(thrown)
            ids += thrown
            continue
        words = np.frombuffer(make_mask(grammar, VOCAB, ()), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little")[:VOCAB])
        if not len(allowed):
            break
        token = int(rng.choice(allowed))
        grammar.accept([token])
        ids.append(token)
    ended = grammar.is_terminated or grammar.is_accepting
    return tokenizer.decode(ids, skip_special_tokens=False) if ended else None


def calls_in(text: str, format_: ToolFormat | ChannelFormat) -> list[tuple[str, str]]:
    """Names and arguments, as clients get them."""
    parser = StreamParser(tools=format_, schemas=ToolSchemas.of(TOOLS))
    calls: list[tuple[str, str]] = []
    for event in [*parser.feed(text), *parser.end()]:
        if isinstance(event, CallBegun):
            calls.append((event.name, ""))
        elif isinstance(event, ArgumentsDelta):
            calls[-1] = calls[-1][0], calls[-1][1] + event.text
    return calls


@pytest.mark.parametrize("name", HELD)
def test_calls_are_valid_whatever_is_drawn(
    compiler: GuidanceBackend, tokenizer: Tokenizer, name: str
):
    """By every mark that begins a call: a tool that there is, arguments under its schema."""
    format_ = TOOL_FORMATS[name]
    assert isinstance(format_, ToolFormat)
    check_strict(chat(), format_)
    wanted = json.loads(strict_form(chat(), format_)["structured_outputs"]["structural_tag"])
    ends = ['"', "}", "]", " ", "true"]
    for text in format_.texts:
        if text.parameters is not None:
            ends += [text.parameters.pad + text.parameters.end, text.parameters.end]
        if text.literals is not None:
            ends += [text.literals.quote, text.end]
    closers = [tokenizer.encode(each, add_special_tokens=False) for each in ends]
    seen: set[str] = set()
    for text in format_.texts:
        wanted["format"] |= {"at_least_one": True, "stop_after_first": True}
        wanted["format"]["triggers"] = [text.trigger]
        tags = [each for each in tags_of(format_) if each["begin"].startswith(text.trigger)]
        form = wanted | {"format": wanted["format"] | {"tags": tags}}
        held = {"structural_tag": json.dumps(form), "disable_any_whitespace": True}
        ended = 0
        for seed in range(DRAWS):
            drawn = draw(compiled(compiler, **held), tokenizer, closers, seed)
            if drawn is None:
                continue
            ended += 1
            ((called, arguments),) = calls_in(drawn, format_)
            seen.add(called)
            schema = {"look_up": SCHEMA, "now": EMPTY}[called]
            jsonschema.validate(json.loads(arguments), schema)
        assert ended > DRAWS // 3, text.trigger
    assert seen == {"look_up", "now"}


def form_of(name: str, **fields: Any) -> dict[str, Any]:
    """The form of a whole answer in a format."""
    body, format_ = chat(**fields), TOOL_FORMATS[name]
    check_strict(body, format_)
    assert body.ignored == []
    wanted = strict_form(body, format_)["structured_outputs"]["structural_tag"]
    form: dict[str, Any] = json.loads(wanted)["format"]
    return form


def begun(form: dict[str, Any]) -> dict[str, Any]:
    """The part of a form that has calls and nothing else."""
    elements = form["elements"]
    first: dict[str, Any] = elements[0] if form["type"] == "or" else elements[1]["elements"][0]
    return first


def of_form(compiler: GuidanceBackend, form: dict[str, Any]) -> Grammar:
    tag = json.dumps({"type": "structural_tag", "format": form})
    return compiled(compiler, structural_tag=tag, disable_any_whitespace=True)


@pytest.mark.parametrize("name", OTHERS)
def test_calls_without_a_mark_are_valid_whatever_is_drawn(
    compiler: GuidanceBackend, tokenizer: Tokenizer, name: str
):
    """Calls that begin an answer, and calls of messages."""
    form = begun(form_of(name, parallel_tool_calls=False))
    closers = [
        tokenizer.encode(each, add_special_tokens=False) for each in ('"', "}", "]", ")", " ", "1")
    ]
    seen, ended = set[str](), 0
    for seed in range(2 * DRAWS):
        drawn = draw(of_form(compiler, form), tokenizer, closers, seed)
        if drawn is None:
            continue
        ended += 1
        ((called, arguments),) = calls_in(drawn, TOOL_FORMATS[name])
        seen.add(called)
        jsonschema.validate(json.loads(arguments), {"look_up": SCHEMA, "now": EMPTY}[called])
    assert ended > DRAWS // 2
    assert seen == {"look_up", "now"}


ARGUMENTS = '{"text":"a","unit":"C","count":3,"short":"ab","place":{"x":1}}'
RIGHT = {
    "llama3_json": f'{{"name": "look_up", "parameters": {ARGUMENTS}}}',
    "pythonic": '[look_up(text="a\\"b", unit="none", count=3, short="ab", maybe=None, '
    'place={"x": 1})]',
    "gemma4": '<|tool_call>call:look_up{text:<|"|>a "b"<|"|>,unit:<|"|>C<|"|>,count:3,'
    'short:<|"|>ab<|"|>,flags:[true,false],place:{x:1}}<tool_call|>',
    "functiongemma": "<start_function_call>call:look_up{text:<escape>a<escape>,"
    "unit:<escape>C<escape>,count:3,short:<escape>ab<escape>,place:{x:1}}<end_function_call>",
    "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
    f" to=functions.look_up <|constrain|>json<|message|>{ARGUMENTS}",
}
RIGHT["llama4_pythonic"] = f"<|python_start|>{RIGHT['pythonic']}<|python_end|>"


def takes(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    try:
        grammar.accept(tokenizer.encode(text, add_special_tokens=False))
    except GrammarError:
        return False
    return grammar.is_accepting


@pytest.mark.parametrize("name", RIGHT)
def test_a_strict_call_is_taken_and_a_wrong_one_is_not(
    compiler: GuidanceBackend, tokenizer: Tokenizer, name: str
):
    """Wrong are another tool, a value of another type, and an argument that is missing."""
    right, form = RIGHT[name], form_of(name)
    assert takes(of_form(compiler, form), tokenizer, right)
    ((called, arguments),) = calls_in(right, TOOL_FORMATS[name])
    jsonschema.validate(json.loads(arguments), SCHEMA)
    assert called == "look_up"
    for old, new in (("look_up", "look_in"), ("3", "2"), ("3", "x"), ("text", "txt")):
        assert not takes(of_form(compiler, form), tokenizer, right.replace(old, new, 1)), new


WORDS = {
    "llama3_json": ["Well.", '{"answer": 5}', '{"nam": 1}', "", "<b>", " A {x}", "[1]"],
    "pythonic": ["Well.", '{"a": 5}', "[link](url)", "[1, 2]", "", "<b>", " f(x)"],
    "gemma4": ["Well.", '{"a": 5}', "[f(a=1)]", ""],
    "openai": ["<|channel|>final<|message|>Well."],
}


@pytest.mark.parametrize("name", WORDS)
def test_words_are_free_next_to_strict_tools(
    compiler: GuidanceBackend, tokenizer: Tokenizer, name: str
):
    form = form_of(name)
    for words in WORDS[name]:
        assert takes(of_form(compiler, form), tokenizer, words), words


@pytest.mark.parametrize(
    ("name", "between"), [("llama3_json", "; "), ("pythonic", None), ("gemma4", "")]
)
def test_several_calls_are_taken_unless_one_is_asked_for(
    compiler: GuidanceBackend, tokenizer: Tokenizer, name: str, between: str | None
):
    one = RIGHT[name]
    two = f"{one[:-1]}, now()]" if between is None else between.join([one, one])
    assert len(calls_in(two, TOOL_FORMATS[name])) == 2
    assert takes(of_form(compiler, form_of(name)), tokenizer, two)
    single = form_of(name, parallel_tool_calls=False)
    assert not takes(of_form(compiler, single), tokenizer, two)


def test_many_strict_tools_are_best_effort_beyond_the_bounds_of_a_grammar():
    """An agent with more tools than a grammar takes is served all the same."""
    tools = [
        {**TOOLS[0], "function": {**TOOLS[0]["function"], "name": f"tool_{each}"}}
        for each in range(60)
    ]
    for name, format_ in TOOL_FORMATS.items():
        body = chat(tools=tools)
        check_strict(body, format_)
        strict_form(body, format_)
        assert body.ignored in ([], ["tools.strict"]), name


def tags_of(format_: ToolFormat) -> list[dict[str, Any]]:
    form = strict_form(chat(), format_)["structured_outputs"]["structural_tag"]
    tags: list[dict[str, Any]] = json.loads(form)["format"]["tags"]
    return tags


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "array"}, "/type"),
    ({"anyOf": [{"type": "object"}]}, "/anyOf"),
    ({"properties": {"a": {}}, "minProperties": 1}, "/minProperties"),
    ({"properties": {}, "required": ["b"]}, "/required"),
    ({"properties": {"a\nb": {"type": "string"}}}, "/properties/a\nb"),
    ({"properties": {"a": {"type": "string", "pattern": "^x"}}}, "/properties/a/pattern"),
    ({"properties": {"a": {"type": ["string", "integer"]}}}, "/properties/a"),
    ({"properties": {"a": {"type": "string", "enum": ["x\n"]}}}, "/properties/a"),
    ({"properties": {"a": {"type": ["string", "null"], "enum": ["None"]}}}, "/properties/a"),
    ({"properties": {"a": {"type": ["string", "null"], "maxLength": 3}}}, "/properties/a"),
    ({"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}, "/properties/a/items/$ref"),
]


@pytest.mark.parametrize(("schema", "at"), REFUSED)
def test_what_cannot_be_held_to_between_tags_is_best_effort(schema: dict[str, Any], at: str):
    """Where arguments are JSON, it is the worker's grammar that says so."""
    function = {"name": "f", "parameters": schema, "strict": True}
    body = chat(tools=[{"type": "function", "function": function}])
    with pytest.raises(NotFollowed) as found:
        parameters_form(schema, TOOL_FORMATS["qwen3_xml"].texts[0].parameters)  # type: ignore[arg-type]
    assert found.value.at == at
    check_strict(body, TOOL_FORMATS["qwen3_xml"])
    assert body.ignored == ["tools.strict"]
    assert strict_form(body, TOOL_FORMATS["qwen3_xml"]) == {}

    for fields, name in (({"strict": True}, "hermes"), ({"strict": False}, "glm45")):
        body = chat(tools=[{"type": "function", "function": {**function, **fields}}])
        check_strict(body, TOOL_FORMATS[name])
        assert body.ignored == []


def test_a_tool_that_is_not_strict_may_be_given_anything(
    compiler: GuidanceBackend, tokenizer: Tokenizer
):
    loose = {"type": "function", "function": {"name": "g", "parameters": SCHEMA}}
    form = strict_form(chat(tools=[TOOLS[1], loose]), TOOL_FORMATS["qwen3_xml"])
    grammar = compiled(compiler, **form["structured_outputs"])
    text = "<function=g>\n<parameter=x>\n1\n</parameter>\n</function>"
    grammar.accept(tokenizer.encode(text, add_special_tokens=False))
    assert grammar.is_accepting


@pytest.mark.parametrize("name", [*RIGHT, "hermes"])
def test_an_answer_in_a_form_may_be_calls_instead(
    compiler: GuidanceBackend, tokenizer: Tokenizer, name: str
):
    """OpenAI's response_format next to tools: calls first, the form at last."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    form = form_of(name, response_format=wanted)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    head = "<|channel|>final<|message|>" if name == "openai" else ""

    assert takes(of_form(compiler, form), tokenizer, RIGHT.get(name, call))
    assert takes(of_form(compiler, form), tokenizer, f'{head}{{"n":5}}')
    assert not takes(of_form(compiler, form), tokenizer, f'{head}{{"n":"x"}}')
    assert not takes(of_form(compiler, form), tokenizer, f"{head}Well.")
