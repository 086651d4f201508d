"""Tools that are ``strict`` though the model decides whether it calls them.

A grammar leaves the model its words, and from the mark that begins a call on holds it to a tool
that there is, with arguments that are valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.protocol.errors import InvalidParameter
from tandem.router.openai.schemas import ChatBody
from tandem.text.parsers.tables import CallText, ChannelFormat, ToolFormat

Format = ToolFormat | ChannelFormat | None


def check_strict(body: ChatBody, format_: Format) -> None:
    """Raise InvalidParameter for a strict tool that cannot be held to its schema."""
    for index, tool in enumerate(_tools(body)):
        if not _is_strict(tool):
            continue
        where = f"tools[{index}].function.strict"
        if _text_of(format_) is None:
            allowed = "false unless calls are forced: this model's format of calls has no grammar"
            raise InvalidParameter(where, True, allowed)
        if "structured_outputs" in body.sampling():
            allowed = "false together with response_format or structured_outputs"
            raise InvalidParameter(where, True, allowed)


def strict_form(body: ChatBody, format_: Format) -> dict[str, Any]:
    """The sampling parameter that holds calls to their tools; none where no tool is strict."""
    text, tools = _text_of(format_), _tools(body)
    if text is None or not any(map(_is_strict, tools)):
        return {}
    tags = []
    for tool in tools:
        function = tool["function"]
        schema = (function.get("parameters") if _is_strict(tool) else None) or {"type": "object"}
        content = {"type": "json_schema", "json_schema": schema}
        begin = text.begin.replace("{name}", function["name"])
        tags.append({"begin": begin, "content": content, "end": text.end})
    form = {
        "type": "triggered_tags",
        "triggers": [text.trigger],
        "tags": tags,
        "stop_after_first": body.parallel_tool_calls is False,
    }
    tag = msgspec.json.encode({"type": "structural_tag", "format": form}).decode()
    return {"structured_outputs": {"structural_tag": tag, "disable_any_whitespace": True}}


def _tools(body: ChatBody) -> list[dict[str, Any]]:
    return [] if body.tool_choice == "none" else body.tools or []


def _text_of(format_: Format) -> CallText | None:
    return format_.text if isinstance(format_, ToolFormat) else None


def _is_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and bool(function.get("strict"))
