"""Words that are not JSON Schema's own are annotations; its own formats hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.engine_run.grammar_draws import VOCAB, compiled

from tandem.engine.structured.backends.base import Grammar, GrammarBackend
from tandem.engine.structured.backends.guidance import GuidanceBackend
from tandem.engine.structured.errors import GrammarError
from tandem.text.tokenizer import Tokenizer

pytestmark = pytest.mark.full

UNKNOWN = [
    *("password", "path", "file-path", "uuid1", "uuid4", "nanoid", "cuid", "ulid", "jwt", "base64"),
    *("byte", "binary", "decimal", "int32", "int64", "float", "double", "ipv4network", "color"),
    *("json-string", "phone", "e164", "cidrv4", "emoji", "", "a format of ours"),
]
OTHERS: dict[str, Any] = {
    "nullable": False,
    "example": "x",
    "examples": ["x"],
    "discriminator": {"propertyName": "kind"},
    "xml": {"name": "x"},
    "externalDocs": {"url": "http://127.0.0.1/"},
    "x-order": 1,
    "enumNames": ["a"],
    "markdownDescription": "x",
    "errorMessage": "x",
    "depth": 1,
    "maxDigits": 1,
}


@pytest.fixture(scope="module")
def compiler(smollm2: Path) -> GuidanceBackend:
    return GuidanceBackend(smollm2, VOCAB)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


def allows(grammar: Grammar, tokenizer: Tokenizer, value: object) -> bool:
    text = json.dumps(value, separators=(",", ":"))
    try:
        grammar.accept(tokenizer.encode(text, add_special_tokens=False))
    except GrammarError:
        return False
    return grammar.is_accepting


def of(compiler: GrammarBackend, schema: object) -> Grammar:
    return compiled(compiler, json=json.dumps(schema), disable_any_whitespace=True)


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_format_is_an_annotation(
    compiler: GrammarBackend, tokenizer: Tokenizer, name: str
) -> None:
    """Wherever it stands: of properties, items, definitions, and next to other keywords."""
    text = {"type": "string", "format": name, "maxLength": 3}
    schema = {
        "type": "object",
        "properties": {
            "a": text,
            "b": {"type": "array", "items": {"$ref": "#/$defs/text"}},
            "c": {"anyOf": [{"type": "string", "format": name}, {"type": "null"}]},
            "format": {"type": "integer", "format": name},
        },
        "required": ["a", "b", "c", "format"],
        "additionalProperties": False,
        "$defs": {"text": text},
    }
    right = {"a": "x", "b": ["y"], "c": None, "format": 5}

    assert allows(of(compiler, schema), tokenizer, right)
    assert not allows(of(compiler, schema), tokenizer, {**right, "a": "long"})
    assert not allows(of(compiler, schema), tokenizer, {**right, "b": ["long"]})


@pytest.mark.parametrize("name", ["date", "ipv4", "uuid"])
def test_a_format_of_json_schema_holds(
    compiler: GrammarBackend, tokenizer: Tokenizer, name: str
) -> None:
    """It is not taken for an annotation."""
    assert not allows(of(compiler, {"type": "string", "format": name}), tokenizer, "x")


@pytest.mark.parametrize("keyword", OTHERS)
def test_an_unknown_keyword_is_an_annotation(
    compiler: GrammarBackend, tokenizer: Tokenizer, keyword: str
) -> None:
    """Of an object, of its properties, and next to a reference."""
    other = {keyword: OTHERS[keyword]}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", **other}, "b": {"$ref": "#/$defs/b", **other}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"b": {"type": "boolean"}},
        **other,
    }

    assert allows(of(compiler, schema), tokenizer, {"a": 55, "b": True})
    assert not allows(of(compiler, schema), tokenizer, {"a": "x", "b": True})


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^a": {"minimum": 3}}},
            {"a": 5, "ab": 4},
            {"a": 1},
        ),
        (
            {
                "properties": {"a": {"type": "string", "format": "password"}},
                "patternProperties": {"^a": {"type": "string", "format": "jwt", "maxLength": 3}},
                "required": ["a"],
            },
            {"a": "x"},
            {"a": "long"},
        ),
        (
            {
                "properties": {"a": {"type": ["string", "integer"]}},
                "patternProperties": {"^a": {"type": "integer"}},
            },
            {"a": 5},
            {"a": "x"},
        ),
        (
            {
                "properties": {"a": {"type": "integer"}},
                "patternProperties": {"^a": {"type": "string"}},
            },
            {},
            {"a": 5},
        ),
    ],
)
def test_a_declared_property_keeps_to_patterns_too(
    compiler: GrammarBackend,
    tokenizer: Tokenizer,
    schema: dict[str, Any],
    right: dict[str, Any],
    wrong: dict[str, Any],
) -> None:
    """Its values are valid under both."""
    schema = {"type": "object", **schema}
    assert allows(of(compiler, schema), tokenizer, right)
    assert not allows(of(compiler, schema), tokenizer, wrong)


def test_a_required_property_without_a_value_is_named(compiler: GrammarBackend) -> None:
    """The error says which keywords exclude each other."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"^a": {"type": "string"}},
        "required": ["a"],
    }
    words = "a value for its required property 'a': properties, patternProperties and allOf"
    with pytest.raises(GrammarError, match=re.escape(words)):
        of(compiler, schema)
