"""Strict parameters between tags that may be one of several things."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.router.api.openai.strict_parameters import NotFollowed, parameters_form
from tandem.text.parsers.calls import ToolSchemas
from tandem.text.parsers.engine import StreamParser
from tandem.text.parsers.events import ArgumentsDelta
from tandem.text.parsers.formats import TOOL_FORMATS
from tandem.text.parsers.tables import ParameterText, ToolFormat

NULL = {"type": "null"}


def text_of(name: str) -> ParameterText:
    table = TOOL_FORMATS[name]
    assert isinstance(table, ToolFormat)
    parameters = table.texts[-1].parameters
    assert parameters is not None
    return parameters


def content_of(schema: Any) -> Any:
    """What a grammar allows between the tags of a parameter."""
    made = parameters_form({"properties": {"x": schema}, "required": ["x"]}, text_of("qwen3_xml"))
    return made["elements"][0]["elements"][0]["content"]


def arguments_of(schema: Any, value: str) -> str:
    """What is read where a model writes a value for such a parameter."""
    text = text_of("qwen3_xml")
    function = {"name": "f", "parameters": {"properties": {"x": schema}}}
    stream = StreamParser(
        tools=TOOL_FORMATS["qwen3_xml"],
        schemas=ToolSchemas.of([{"type": "function", "function": function}]),
    )
    written = f"{text.begin.replace('{key}', 'x')}{value}{text.pad}{text.end}{text.after}"
    events = [*stream.feed(f"<function=f>\n{written}</function>"), *stream.end()]
    return "".join(each.text for each in events if isinstance(each, ArgumentsDelta))


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"enum": ["a", "2024"]}, NULL]},
        {"oneOf": [{"type": "string", "enum": ["a", "2024"]}, {**NULL, "title": "None"}]},
        {"anyOf": [{"const": "a"}, {"const": "2024"}, NULL]},
    ],
)
def test_texts_or_null_are_written_and_read_as_what_they_are(schema: Any) -> None:
    """An enum of texts without a type was held to JSON, and read with its quotes."""
    content = content_of(schema)

    assert content["type"] == "or"
    written = [each["value"] for each in content["elements"]]
    assert {each["type"] for each in content["elements"]} == {"const_string"}
    read = [arguments_of(schema, value) for value in written]
    assert read == ['{"x": "a"}', '{"x": "2024"}', '{"x": null}']


def test_any_text_or_null_may_be_said_in_one_list_of_types() -> None:
    schema = {"anyOf": [{"type": ["string", "null"]}, NULL]}

    assert content_of(schema) == {"type": "any_text"}
    assert arguments_of(schema, "2024") == '{"x": "2024"}'
    assert arguments_of(schema, "null") == '{"x": null}'


@pytest.mark.parametrize(
    ("schema", "at"),
    [
        ({"anyOf": [{"enum": ["a", "null"]}, NULL]}, "/properties/x"),
        ({"anyOf": [{"enum": ["a"]}, NULL], "minLength": 2}, "/properties/x/minLength"),
        ({"anyOf": [{"enum": ["a"], "minLength": 2}, NULL]}, "/properties/x/anyOf"),
        ({"anyOf": [{"type": ["string", "null"]}, {"type": "integer"}]}, "/properties/x"),
        ({"anyOf": [{"const": "a"}, {"type": "integer"}]}, "/properties/x"),
        ({"type": "string", "anyOf": [5, NULL]}, "/properties/x/anyOf"),
        ({"type": "string", "anyOf": [{"enum": ["a"]}]}, "/properties/x/type"),
        ({"anyOf": [{"anyOf": [{"type": "string"}, NULL]}, NULL]}, "/properties/x/anyOf"),
    ],
)
def test_what_would_be_read_as_another_is_refused(schema: Any, at: str) -> None:
    with pytest.raises(NotFollowed) as refused:
        content_of(schema)
    assert refused.value.at == at
