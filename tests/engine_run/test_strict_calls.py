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

from tandem.engine.structured.constraint import make_mask
from tandem.engine.structured.grammar import Grammar, GrammarError
from tandem.engine.structured.llguidance import LLGuidanceCompiler
from tandem.router.openai.bodies.schemas import ChatBody
from tandem.router.openai.strict_calls import check_strict, strict_form
from tandem.router.openai.strict_parameters import NotFollowed, parameters_form
from tandem.text.parsers.calls import ToolSchemas
from tandem.text.parsers.engine import StreamParser
from tandem.text.parsers.events import ArgumentsDelta, CallBegun
from tandem.text.parsers.formats import TOOL_FORMATS
from tandem.text.parsers.tables import ToolFormat
from tandem.text.tokenizer import Tokenizer

HELD = [name for name, each in TOOL_FORMATS.items() if isinstance(each, ToolFormat) and each.texts]
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
    """The model's."""
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="module")
def compiler(smollm2: Path) -> LLGuidanceCompiler:
    """Over the model's tokenizer."""
    return LLGuidanceCompiler(smollm2, VOCAB)


def chat(**fields: Any) -> ChatBody:
    """A body with the tools."""
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


def calls_in(text: str, format_: ToolFormat) -> list[tuple[str, str]]:
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
    compiler: LLGuidanceCompiler, tokenizer: Tokenizer, name: str
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


def tags_of(format_: ToolFormat) -> list[dict[str, Any]]:
    """Of all marks and tools."""
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
        parameters_form(schema, TOOL_FORMATS["qwen3_xml"].texts[0].parameters)  # type: ignore[union-attr, arg-type]
    assert found.value.at == at
    check_strict(body, TOOL_FORMATS["qwen3_xml"])
    assert body.ignored == ["tools.strict"]
    assert strict_form(body, TOOL_FORMATS["qwen3_xml"]) == {}

    for fields, name in (({"strict": True}, "hermes"), ({"strict": False}, "glm45")):
        body = chat(tools=[{"type": "function", "function": {**function, **fields}}])
        check_strict(body, TOOL_FORMATS[name])
        assert body.ignored == []


def test_a_tool_that_is_not_strict_may_be_given_anything(
    compiler: LLGuidanceCompiler, tokenizer: Tokenizer
):
    """Beside one that is."""
    loose = {"type": "function", "function": {"name": "g", "parameters": SCHEMA}}
    form = strict_form(chat(tools=[TOOLS[1], loose]), TOOL_FORMATS["qwen3_xml"])
    grammar = compiled(compiler, **form["structured_outputs"])
    text = "<function=g>\n<parameter=x>\n1\n</parameter>\n</function>"
    grammar.accept(tokenizer.encode(text, add_special_tokens=False))
    assert grammar.is_accepting
