"""Tools of a chat: functions are kept, other types are hints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import Field

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.structured import KINDS
from tandem.router.api.openai.bodies import parameters
from tandem.router.api.openai.bodies.bounds import Body
from tandem.router.api.openai.bodies.hints import Reading, ignore_tool
from tandem.router.api.openai.bodies.parameters import Refused
from tandem.text.chat_calls import check_tools

_KINDS = f"exactly one of {', '.join(KINDS[:-1])} and {KINDS[-1]}"
_SCHEMA = "response_format.json_schema.schema"


class StructuredOutputs(Body):
    """Format that the whole answer must match. Exactly one of ``KINDS`` is set."""

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.STRUCTURED_OUTPUTS

    choice: list[str] | None = Field(default=None, fail_fast=True)
    regex: str | None = None
    schema_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    backend: Literal["guidance", "outlines", "xgrammar", "lm-format-enforcer"] | None = None

    def check(self, reading: Reading, prefix: str = "") -> None:
        super().check(reading, prefix)
        given = self.given()
        kinds = [name for name in KINDS if name in given]
        if len(kinds) != 1:
            raise InvalidParameter(prefix.rstrip("."), sorted(given), _KINDS)

    def given(self) -> dict[str, Any]:
        """Return the fields of ``StructuredOutputsParams``; false is absent."""
        fields = self.model_dump(
            by_alias=True, exclude_none=True, include=set(type(self).model_fields)
        )
        fields = {
            name: value for name, value in fields.items() if value is not False or name == "json"
        }
        for name in ("json", "structural_tag"):
            if not isinstance(fields.get(name, ""), str):
                fields[name] = _text(fields[name])
        return fields


class JsonSchema(Body):
    """Schema with its name. It is always enforced."""

    REFUSED: ClassVar[Mapping[str, Refused]] = {}

    name: str | None = Field(default=None, max_length=512)
    description: str | None = Field(default=None, max_length=65_536)
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Format of the text."""

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.RESPONSE_FORMAT

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    def check(self, reading: Reading, prefix: str = "") -> None:
        if (self.json_schema is not None) is not (self.type == "json_schema"):
            allowed = 'an object with a schema for type "json_schema", else null'
            value = None if self.json_schema is None else self.json_schema.model_dump(by_alias=True)
            raise InvalidParameter(f"{prefix}json_schema", value, allowed)
        self._check_tag(prefix)
        super().check(reading, prefix)

    def _check_tag(self, prefix: str) -> None:
        given = self._tag_fields()
        if self.type != "structural_tag":
            for name, value in given.items():
                allowed = 'only with the type "structural_tag"'
                raise InvalidParameter(f"{prefix}{name}", value, allowed)
        elif [*given] not in (["format"], ["structures", "triggers"]):
            allowed = "an object, or structures and triggers in its place"
            raise InvalidParameter(f"{prefix}format", self.format, allowed)

    def _tag_fields(self) -> dict[str, Any]:
        tag = {"format": self.format, "structures": self.structures, "triggers": self.triggers}
        return {name: value for name, value in tag.items() if value is not None}

    def given(self) -> dict[str, Any]:
        """Return the fields of ``StructuredOutputsParams``; none for any text."""
        if self.type == "structural_tag":
            return {"structural_tag": _text(self._tag_fields())}
        if self.json_schema is not None:
            return {"json": _text(self.json_schema.schema_)}
        return {"json_object": True} if self.type == "json_object" else {}

    def client_names(self) -> dict[str, str]:
        """Return the client's names of fields of ``structured_outputs``."""
        if self.json_schema is not None:
            return {"structured_outputs.json": _SCHEMA}
        if self.type == "structural_tag":
            return {"structured_outputs.structural_tag": "response_format"}
        return {"structured_outputs.json_object": "response_format.type"}


def wanted_of(
    structured: StructuredOutputs | None, response: ResponseFormat | None
) -> dict[str, Any] | None:
    """Return the fields of ``StructuredOutputsParams``, or None for any text.

    Raises InvalidParameter for a request with both fields.
    """
    wanted = {} if response is None else response.given()
    if structured is None:
        return wanted or None
    if wanted:
        assert response is not None
        allowed = '"text" together with structured_outputs'
        raise InvalidParameter("response_format.type", response.type, allowed)
    return structured.given()


def _text(schema: object) -> str:
    return msgspec.json.encode(schema).decode()


Tool = dict[str, Any]


def functions_of(tools: Sequence[Tool], reading: Reading) -> tuple[list[Tool], list[int]]:
    """Return the functions and their indices in ``tools``; note other types.

    Raises InvalidParameter for a malformed function.
    """
    kept: list[Tool] = []
    places: list[int] = []
    for place, tool in enumerate(tools):
        kind = tool.get("type", "function")
        if isinstance(kind, str) and kind != "function":
            ignore_tool(kind, reading)
            continue
        check_tools([tool], first=place)
        kept.append(tool)
        places.append(place)
    return kept, places


def has_other_type(choice: Mapping[str, Any] | str | None) -> bool:
    """Return whether a ``tool_choice`` requires a tool that is not a function."""
    return isinstance(choice, Mapping) and choice.get("type", "function") != "function"


Tools = Sequence[Mapping[str, Any]]
Choice = str | Mapping[str, Any] | None
MOST_CALLS = 16
"""Maximum calls of one answer with ``required``."""
_ALLOWED = '"none", "auto", "required", or {"type": "function", "function": {"name": one of tools}}'


def check_choice(choice: Choice, tools: Tools, *, has_form: bool) -> None:
    """Raise InvalidParameter for an invalid ``tool_choice``.

    ``has_form``: the request sets the form of the answer.
    """
    if not is_forced(choice):
        return
    if has_other_type(choice):
        raise InvalidParameter("tool_choice", choice, _ALLOWED)
    if not tools:
        allowed = '"none" or "auto" without tools that are functions'
        raise InvalidParameter("tool_choice", choice, allowed)
    if choice != "required" and _name_of(choice) not in [_name(tool) for tool in tools]:
        raise InvalidParameter("tool_choice", choice, _ALLOWED)
    if has_form:
        allowed = '"none" or "auto" together with response_format or structured_outputs'
        raise InvalidParameter("tool_choice", choice, allowed)


def is_forced(choice: Choice) -> bool:
    """Return whether the answer must consist of calls."""
    return choice not in (None, "none", "auto")


def is_named(choice: Choice) -> bool:
    """Return whether the answer must call one named tool."""
    return isinstance(choice, Mapping)


def schema_of(
    choice: Choice, tools: Tools, *, parallel: bool, place_of: Callable[[int], int]
) -> str:
    """Return the JSON schema of forced calls, of one call unless ``parallel``.

    ``place_of``: a tool's index in the request's list.
    """
    named = _name_of(choice)
    wanted = [(at, tool) for at, tool in enumerate(tools) if named in (None, _name(tool))]
    one = named is not None or not parallel
    schema = {
        "type": "array",
        "minItems": 1,
        "maxItems": 1 if one else MOST_CALLS,
        "items": {
            "anyOf": [
                _call_of(option, tool, place_of(at)) for option, (at, tool) in enumerate(wanted)
            ]
        },
    }
    return msgspec.json.encode(schema).decode()


def _call_of(option: int, tool: Mapping[str, Any], place: int) -> dict[str, Any]:
    wanted = tool["function"].get("parameters")
    if wanted is None:
        wanted = {"type": "object"}
    if not isinstance(wanted, dict):
        raise InvalidParameter(f"tools[{place}].function.parameters", wanted, "a JSON schema")
    return {
        "type": "object",
        "properties": {
            "name": {"const": _name(tool)},
            "parameters": _moved(wanted, f"#/items/anyOf/{option}/properties/parameters"),
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, to: str) -> Any:
    """Return the schema with its references into itself moved to ``to`` in another."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, to) for key, value in schema.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = to + reference[1:]
        return moved
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [_moved(value, to) for value in schema]
    return schema


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])


def _name_of(choice: object) -> str | None:
    """Return the name of a choice's tool; "" if it names none, None if it is ``required``."""
    if not isinstance(choice, Mapping):
        return None if choice == "required" else ""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    wrong = choice.get("type", "function") != "function" or not isinstance(name, str)
    return "" if wrong else name
