"""Tools of a chat: functions are kept, other types are hints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.router.openai.bodies.hints import ignore_tool
from tandem.router.openai.bodies.reading import Reading
from tandem.text.chat_calls import check_tools

Tool = dict[str, Any]


def functions_of(tools: Sequence[Tool], reading: Reading) -> tuple[list[Tool], list[int]]:
    """Return the functions and their places in ``tools``, and note tools of other types.

    Raises InvalidParameter for a function that is wrong, by its place in ``tools``.
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
    """Return whether a ``tool_choice`` demands a tool that is not a function."""
    return isinstance(choice, Mapping) and choice.get("type", "function") != "function"
