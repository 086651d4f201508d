"""What is made of strict tools for a grammar is measured while it is made."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tandem.protocol.structured import MAX_SCHEMA_BYTES
from tandem.router.api.openai import strict_parameters
from tandem.router.api.openai.answers import answer_reader
from tandem.router.api.openai.answers.answer_reader import check_strict, strict_form
from tandem.router.api.openai.bodies.schemas import ChatBody
from tandem.text.parsers.formats import TOOL_FORMATS
from tandem.text.parsers.tables import ToolFormat

MODEL = {"type": "object", "properties": {"a": {"type": "string", "description": "x" * 3_100}}}
REFERENCE = {"anyOf": [{"$ref": "#/$defs/M"}, {"type": "null"}]}


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all that is encoded, in bytes."""
    sizes: list[int] = []
    encode = msgspec.json.encode

    class Json:
        @staticmethod
        def encode(value: Any) -> bytes:
            made = encode(value)
            sizes.append(len(made))
            return made

    class Counting:
        json, Raw = Json, msgspec.Raw

    monkeypatch.setattr(answer_reader, "msgspec", Counting)
    monkeypatch.setattr(strict_parameters, "msgspec", Counting, raising=False)
    return sizes


def body_of(schema: Any) -> ChatBody:
    schema = {"$defs": {"M": MODEL}, "properties": {f"p{n}": schema for n in range(380)}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    return ChatBody.model_validate({"messages": [{"role": "user", "content": ""}], "tools": [tool]})


def test_what_grows_beyond_the_bound_is_never_written(encoded: list[int]) -> None:
    """A schema of 30 kB, whose definitions each parameter repeats in both ways to begin a call."""
    table = TOOL_FORMATS["qwen3_xml"]
    body = body_of(REFERENCE)
    check_strict(body, table)
    assert strict_form(body, table) == {}
    assert body.ignored == ["tools.strict"]
    assert sum(encoded) < 3 * MAX_SCHEMA_BYTES


def test_definitions_stand_beside_what_refers_to_them_alone(encoded: list[int]) -> None:
    """So that a tool is not refused for what it has beside its parameters."""
    table = TOOL_FORMATS["glm45"]
    assert isinstance(table, ToolFormat)
    (text,) = table.texts
    assert text.parameters is not None
    strict_form(body_of({"type": "integer"}), table)
    assert max(encoded) < MAX_SCHEMA_BYTES

    schema = {"$defs": {"M": MODEL}, "properties": {"a": REFERENCE, "b": {"type": "integer"}}}
    form = strict_parameters.parameters_form({**schema, "required": ["a", "b"]}, text.parameters)
    contents = [each["elements"][0]["content"]["json_schema"] for each in form["elements"]]
    assert contents == [{**REFERENCE, "$defs": {"M": MODEL}}, {"type": "integer"}]
