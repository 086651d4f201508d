"""Tool calls and tool definitions in the form that chat templates expect.

OpenAI's arguments are JSON in a string; templates write out the parsed value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.protocol.errors import InvalidParameter


def plain_calls(where: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the calls in an assistant's message, with arguments as objects.

    ``function_call`` counts as one call. Raises InvalidParameter that names the call.
    """
    calls = message.get("tool_calls", [])
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise InvalidParameter(f"{where}.tool_calls", calls, "a list of calls")
    plain = [_call(f"{where}.tool_calls[{index}]", each) for index, each in enumerate(calls)]
    if not plain and "function_call" in message:
        function = _function(f"{where}.function_call", message["function_call"])
        return [{"type": "function", "function": function}]
    return plain


def check_tools(tools: Sequence[Mapping[str, Any]], *, first: int = 0) -> None:
    """Raise InvalidParameter unless each is ``{"type": "function", "function": {"name": ...}}``.

    ``first``: index of the first one in the request.
    """
    for index, tool in enumerate(tools, first):
        _check_type(f"tools[{index}]", tool)
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise InvalidParameter(f"tools[{index}].function", function, "an object with a name")
        _check_name(f"tools[{index}].function.name", function.get("name"))


def _call(where: str, call: object) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise InvalidParameter(where, call, "an object with type, id and function")
    _check_type(where, call)
    return {
        "type": "function",
        **call,
        "function": _function(f"{where}.function", call.get("function")),
    }


def _check_type(where: str, value: Mapping[str, Any]) -> None:
    if value.get("type", "function") != "function":
        raise InvalidParameter(f"{where}.type", value["type"], '"function"')


def _function(where: str, function: object) -> dict[str, Any]:
    if not isinstance(function, Mapping):
        raise InvalidParameter(where, function, "an object with name and arguments")
    _check_name(f"{where}.name", function.get("name"))
    return {**function, "arguments": _arguments(f"{where}.arguments", function.get("arguments"))}


def _check_name(where: str, name: object) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidParameter(where, name, "the name of a function")


def _arguments(where: str, arguments: object) -> object:
    if not arguments:
        return {}
    if isinstance(arguments, Mapping):
        return arguments
    if not isinstance(arguments, str):
        raise InvalidParameter(where, arguments, "an object as JSON in a text")
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
