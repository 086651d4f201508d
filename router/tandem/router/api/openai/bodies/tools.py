"""Tools of a chat: functions are kept, other types are hints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tandem.protocol.errors import InvalidParameter
from tandem.router.api.openai.bodies.hints import Reading, ignore_tool
from tandem.text.chat_calls import check_tools

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
