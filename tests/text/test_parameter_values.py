"""Values between tags: what a schema that refers elsewhere asks for, and line ends of their own."""

from __future__ import annotations

from typing import Any

import pytest
from tests.text.parser_streams import WRITERS
from tests.text.test_parsers import Said, check_cuts

from tandem.text.parsers.calls import ToolSchemas
from tandem.text.parsers.engine import StreamParser
from tandem.text.parsers.formats import TOOL_FORMATS
from tandem.text.parsers.values import DEFINED_STRING, types_of

DEFS: dict[str, Any] = {
    "M": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "E": {"type": "string", "enum": ["red", "1"]},
    "Alias": {"$ref": "#/$defs/M"},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Wide": {"anyOf": [{"$ref": "#/$defs/Wide"}] * 300},
}
NULL = {"type": "null"}


def ref(name: str, room: str = "$defs") -> dict[str, str]:
    return {"$ref": f"#/{room}/{name}"}


@pytest.mark.parametrize(
    ("schema", "written", "meant"),
    [
        ({"anyOf": [ref("M"), NULL]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [ref("M"), NULL]}, "null", None),
        ({"oneOf": [ref("Alias"), NULL]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [ref("E"), NULL]}, '"red"', "red"),
        ({"anyOf": [ref("E"), NULL]}, "red", "red"),
        ({"anyOf": [ref("E"), NULL]}, "null", None),
        ({"anyOf": [ref("E"), NULL]}, "1", "1"),
        ({"anyOf": [ref("E"), NULL]}, '"1"', "1"),
        ({"anyOf": [ref("E"), NULL]}, '"1" or "2"', '"1" or "2"'),
        ({"anyOf": [ref("E"), NULL]}, "true", "true"),
        ({"anyOf": [ref("E"), ref("M")]}, "1", "1"),
        ({"anyOf": [ref("E"), ref("M")]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"type": "string"}, {"const": "x"}]}, "2024", "2024"),
        ({"const": "2024"}, "2024", "2024"),
        ({"anyOf": [{"type": "string"}, ref("M")]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"type": "string"}, ref("M")]}, "5", "5"),
        ({"anyOf": [{"type": "array"}, {"anyOf": [{"type": "integer"}, NULL]}]}, "5", 5),
        (ref("M"), '{"a": 1}', {"a": 1}),
        (ref("E"), '"red"', "red"),
        (ref("E"), "1", "1"),
        ({"anyOf": [ref("gone"), NULL]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"type": "string"}, NULL]}, '{"a": 1}', '{"a": 1}'),
    ],
)
def test_a_value_has_the_type_that_its_schema_refers_to(
    schema: Any, written: str, meant: Any
) -> None:
    """Pydantic's optional models came as texts in JSON, and a grammar's texts with their quotes."""
    parameters = {"$defs": DEFS, "properties": {"x": schema}}
    function = {"name": "f", "parameters": parameters}
    stream = StreamParser(
        tools=TOOL_FORMATS["qwen3_coder"],
        schemas=ToolSchemas.of([{"type": "function", "function": function}]),
    )
    said = Said().take(stream.feed(f"<function=f>\n<parameter=x>\n{written}\n</parameter>\n"))
    said.take(stream.feed("</function>"))
    said.take(stream.end())

    assert said.meant == [("f", {"x": meant})]


def test_types_are_found_within_bounds() -> None:
    """However references go round in circles; what is not known of a part is not of the whole."""
    root = {"$defs": DEFS, "definitions": {"N": {"type": ["number", "null"]}}}

    assert types_of({"anyOf": [ref("M"), ref("N", "definitions")]}, root) == {
        "object",
        "number",
        "null",
    }
    for unknown in (ref("Wide"), {"anyOf": [NULL, {}]}, {"anyOf": [ref("gone"), NULL]}):
        assert types_of(unknown, root) == frozenset()
    for text in (ref("E"), {"anyOf": [{"type": "string"}, ref("E")]}):
        assert types_of(text, root) == {DEFINED_STRING}
    assert types_of({"anyOf": [ref("Loop"), NULL]}, root) == {"null"}
    assert types_of({"anyOf": [ref("M"), NULL]}) == frozenset()


@pytest.mark.parametrize("name", ["glm45", "minimax_m2", "qwen3_xml"])
@pytest.mark.parametrize("value", ["line\n", "\nline", "\n", "\n\na\n\n"])
def test_line_ends_of_a_value_are_its_own(name: str, value: str) -> None:
    """GLM's and MiniMax's templates write values without any around them, Qwen's with two."""
    calls = [("f", {"text": value})]
    assert check_cuts(WRITERS[name]("", calls), name).meant == calls
