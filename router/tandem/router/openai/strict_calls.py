"""Tools that are ``strict`` though the model decides whether it calls them.

A grammar leaves the model its words, and from the mark that begins a call on holds it to a tool
that there is, with arguments that are valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.structured import MAX_SCHEMA_BYTES
from tandem.router.openai.bodies.schemas import ChatBody
from tandem.router.openai.strict_parameters import NotFollowed, TooLong, parameters_form
from tandem.text.parsers.tables import CallText, ChannelFormat, ToolFormat

Format = ToolFormat | ChannelFormat | None


def check_strict(body: ChatBody, format_: Format) -> None:
    """Raise InvalidParameter for a strict tool that cannot be held to its schema."""
    texts, num_bytes = _texts_of(format_), 0
    for index, tool in enumerate(_tools(body)):
        if not _is_strict(tool):
            continue
        function = f"tools[{index}].function"
        if not texts:
            allowed = "false unless calls are forced: this model's format of calls has no grammar"
            raise InvalidParameter(f"{function}.strict", True, allowed)
        if "structured_outputs" in body.sampling():
            allowed = "false together with response_format or structured_outputs"
            raise InvalidParameter(f"{function}.strict", True, allowed)
        schema = tool["function"].get("parameters")
        size = len(msgspec.json.encode(schema))
        if size > MAX_SCHEMA_BYTES:
            allowed = f"a schema of at most {MAX_SCHEMA_BYTES:,} bytes, or strict: false"
            raise InvalidParameter(f"{function}.parameters", schema, allowed)
        num_bytes += size
        if num_bytes > MAX_SCHEMA_BYTES:  # before more of them are taken apart
            allowed = (
                f"strict tools with schemas of at most {MAX_SCHEMA_BYTES:,} bytes together; "
                f"up to tools[{index}] they have {num_bytes:,}"
            )
            raise InvalidParameter("tools", body.tools, allowed)
        for text in texts:
            try:
                _content(tool["function"], text)
            except NotFollowed as error:
                raise InvalidParameter(
                    f"{function}.parameters", error.at, f"{error.allowed}, or strict: false"
                ) from error


def strict_form(body: ChatBody, format_: Format) -> dict[str, Any]:
    """The sampling parameter that holds calls to their tools; none where no tool is strict. Raises
    InvalidParameter for tools that together are described at too great a length."""
    texts, tools = _texts_of(format_), _tools(body)
    if not texts or not any(map(_is_strict, tools)):
        return {}
    functions = [tool["function"] for tool in tools]
    try:
        form = {
            "type": "triggered_tags",
            "triggers": [each.trigger for each in texts],
            "tags": _tags(functions, texts),
            "stop_after_first": body.parallel_tool_calls is False,
        }
        tag = msgspec.json.encode({"type": "structural_tag", "format": form})
        if len(tag) > MAX_SCHEMA_BYTES:
            raise TooLong
    except TooLong:
        allowed = (
            f"tools whose calls are described in at most {MAX_SCHEMA_BYTES:,} bytes together where "
            "any is strict; this model's format of calls makes more of these"
        )
        raise InvalidParameter("tools", body.tools, allowed) from None
    return {"structured_outputs": {"structural_tag": tag.decode(), "disable_any_whitespace": True}}


def _tags(functions: Sequence[Mapping[str, Any]], texts: Sequence[CallText]) -> list[msgspec.Raw]:
    """What calls of each may be, in JSON: a schema of a few kilobytes may become many megabytes.
    Raises TooLong as soon as they are beyond the bound."""
    room, tags = MAX_SCHEMA_BYTES, []
    for function in functions:
        for text in texts:
            tag = msgspec.json.encode(_tag(function, text, room))
            room -= len(tag)
            if room < 0:
                raise TooLong
            tags.append(msgspec.Raw(tag))
    return tags


def _tag(function: Mapping[str, Any], text: CallText, room: int) -> dict[str, Any]:
    content = _content(function, text, room)
    if text.after_number:
        number = {"type": "regex", "pattern": "[0-9]{1,3}"}
        behind = {"type": "const_string", "value": text.after_number}
        content = {"type": "sequence", "elements": [number, behind, content]}
    begin = text.begin.replace("{name}", function["name"])
    return {"begin": begin, "content": content, "end": text.end}


def _content(
    function: Mapping[str, Any], text: CallText, room: int | None = None
) -> dict[str, Any]:
    """What arguments may be; of a tool that is not strict, anything. Raises NotFollowed, and
    TooLong where they are written one by one in more than ``room`` bytes."""
    schema = function.get("parameters") if function.get("strict") else None
    if text.parameters is None:
        return {"type": "json_schema", "json_schema": schema or {"type": "object"}}
    return parameters_form(schema, text.parameters, room) if schema else {"type": "any_text"}


def _tools(body: ChatBody) -> list[dict[str, Any]]:
    return [] if body.tool_choice == "none" else body.tools or []


def _texts_of(format_: Format) -> tuple[CallText, ...]:
    return format_.texts if isinstance(format_, ToolFormat) else ()


def _is_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and bool(function.get("strict"))
