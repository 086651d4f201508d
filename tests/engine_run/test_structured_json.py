"""Answers in JSON and by grammars: random draws are valid, and what is not followed is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.engine_run.grammar_draws import VOCAB, Drawer, compiled
from tests.engine_run.patience import time_for_grammars

from tandem.engine.structured.backends.base import GrammarBackend
from tandem.engine.structured.backends.guidance import GuidanceBackend
from tandem.engine.structured.errors import GrammarError
from tandem.engine.structured.rewrite import place_of
from tandem.llm import LLM, SamplingParams, StructuredOutputsParams
from tandem.text.tokenizer import Tokenizer

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "anyOf": [
                {"type": "null"},
                {"type": "array", "prefixItems": [{"type": "number"}, {"type": "boolean"}]},
            ]
        }
    },
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "person of any age": {
        **PERSON,
        "properties": {**PERSON["properties"], "age": {"type": "integer"}},
    },
    "pattern": {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]{2}$"},
    "bounds": {"type": "number", "minimum": -2.5, "exclusiveMaximum": 7},
    "const": {"const": {"a": [1, "é", None]}},
    "recursive": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"leaf": {"$ref": "#/$defs/tree"}, "n": {"type": "integer"}},
                "required": ["n"],
                "additionalProperties": False,
            }
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="module")
def drawer(tokenizer: Tokenizer) -> Drawer:
    return Drawer(tokenizer)


@pytest.fixture(scope="module")
def compiler(smollm2: Path) -> GrammarBackend:
    return GuidanceBackend(smollm2, VOCAB)


@pytest.mark.parametrize("blanks", [{}, {"disable_any_whitespace": True}])
@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_drawn_is_valid(
    compiler: GrammarBackend, drawer: Drawer, name: str, blanks: dict[str, Any]
):
    """By the schema's own judge, with any whitespace and with none."""
    ended = 0
    grammar = compiled(compiler, json=json.dumps(SCHEMAS[name]), **blanks)
    for seed in range(6):
        text = drawer.drawn(grammar.copy(), seed)
        if text is None:
            continue
        ended += 1
        jsonschema.validate(json.loads(text), SCHEMAS[name])
        if blanks:
            assert re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text)) is None, text
    assert ended > 2


def test_whitespace_is_what_the_client_says_and_never_endless(
    compiler: GrammarBackend, tokenizer: Tokenizer
):
    """48 signs between two tokens of JSON, or 1, unless an expression says otherwise."""
    blank = tokenizer.encode(" " * 49 + '"', add_special_tokens=False)
    schema = json.dumps({"type": "object", "required": ["a"]})
    start = tokenizer.encode("{", add_special_tokens=False)

    usual = compiled(compiler, json=schema)
    usual.accept(start)
    with pytest.raises(GrammarError):
        usual.accept(blank)
    asked = compiled(compiler, json=schema, whitespace_pattern=" *")
    asked.accept(start + blank)
    none = compiled(compiler, json=schema, disable_any_whitespace=True)
    none.accept(start)
    with pytest.raises(GrammarError):
        none.accept(tokenizer.encode(' "', add_special_tokens=False))


def test_any_object(compiler: GrammarBackend, tokenizer: Tokenizer):
    grammar = compiled(compiler, json_object=True)
    grammar.copy().accept(tokenizer.encode('{"a": [1, {"b": null}]}', add_special_tokens=False))
    with pytest.raises(GrammarError):
        grammar.accept(tokenizer.encode("[1]", add_special_tokens=False))
    compiled(compiler, json="true").accept(tokenizer.encode("[1]", add_special_tokens=False))


def test_a_grammar_in_larks_syntax(compiler: GrammarBackend, drawer: Drawer, tokenizer: Tokenizer):
    grammar = 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{2}/'
    for seed in range(4):
        text = drawer.drawn(compiled(compiler, grammar=grammar), seed)
        assert text is None or re.fullmatch(r"\(*[0-9]{2}\)*", text)
    compiled(compiler, grammar=grammar).accept(tokenizer.encode("((42))", add_special_tokens=False))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"json": '{"properties": {"a": {"uniqueItems": true}}}'}, "uniqueItems at /properties/a"),
        ({"json": '{"not": {}, "$defs": {"not": {}}}'}, "without not at /,"),
        ({"json": '{"type": "objec"}'}, "Invalid type: objec"),
        ({"json": '{"$ref": "#/$defs/x"}'}, "does not exist"),
        ({"json": '{"$ref": "http://127.0.0.1:9/x"}'}, "does not fetch"),
        ({"json": '{"type": "string", "pattern": "(a"}'}, "unclosed group"),
        ({"json": '{"oneOf": [{"type": "string"}, {"maxLength": 3}]}'}, "oneOf"),
        ({"json": "false"}, "some value matches"),
        ({"json": '{"x-guidance": {"lenient": true}}'}, "without x-guidance"),
        ({"json": "{}", "whitespace_pattern": "("}, "unclosed group"),
        ({"grammar": "root ::= a"}, "Lark's syntax"),
        ({"grammar": 'start: %json {"x-guidance": {"lenient": true}}'}, "without x-guidance"),
        ({"grammar": "start: nothing"}, "unknown name"),
    ],
)
def test_what_is_not_followed_is_named(
    compiler: GrammarBackend, fields: dict[str, Any], words: str
):
    """In a line, with the place in the schema where a keyword is not known."""
    with pytest.raises(GrammarError, match=re.escape(words)) as caught:
        compiled(compiler, **fields)
    assert "\n" not in str(caught.value)


def test_a_keyword_is_found_where_it_is_one():
    """Names of properties and values are not keywords."""
    schema = {
        "properties": {"if": {"enum": ["if", {"if": 1}]}, "a/b~": {"items": [{}, {"if": {}}]}},
        "const": {"if": 1},
    }
    assert place_of("if", schema) == "/properties/a~1b~0/items/1"
    assert place_of("then", schema) is None


@pytest.mark.slow
def test_a_model_answers_by_the_schema(small: Path):
    """At temperature 1, two choices each, beside one that is free."""
    chat = [{"role": "user", "content": "Who was Ada Lovelace? Answer in JSON."}]
    schema = {**PERSON, "properties": {**PERSON["properties"], "at": {"type": "null"}}}
    wanted = StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True)
    params = [
        SamplingParams(temperature=1.0, seed=seed, n=2, max_tokens=160, structured_outputs=wanted)
        for seed in range(3)
    ]
    free = SamplingParams(temperature=0.0, max_tokens=12)
    settings: dict[str, Any] = {"device": "cpu"}
    settings |= {"max_model_len": 512, "num_gpu_blocks_override": 96}
    with time_for_grammars(), LLM(str(small), **settings) as llm:
        alone = llm.chat([chat], [free], use_tqdm=False)[0].outputs[0].token_ids
        *answers, beside = llm.chat([chat] * 4, [*params, free], use_tqdm=False)

    assert beside.outputs[0].token_ids == alone
    for answer in answers:
        for choice in answer.outputs:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.text), schema)
