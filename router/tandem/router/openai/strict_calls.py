"""Tools that are ``strict`` though the model decides whether it calls them.

A grammar leaves the model its words, and from the mark that begins a call on holds it to a tool
that there is, with arguments that are valid. Where no grammar can hold a tool to its schema, the
tool is best effort, and the answer reports the hint ``tools.strict``.
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

BEST_EFFORT = "tools.strict"
"""Name of the hint that ``strict`` is for a tool that is not held to its schema."""
Format = ToolFormat | ChannelFormat | None


def check_strict(body: ChatBody, format_: Format) -> None:
    """Note strict tools that no grammar can hold to their schemas.

    Raises InvalidParameter for schemas that are too large.
    """
    texts, num_bytes = _texts_of(format_), 0
    for index, tool in enumerate(_tools(body)):
        if not _is_strict(tool):
            continue
        place = body.tool_place(index)
        function = f"tools[{place}].function"
        schema = tool["function"].get("parameters")
        size = len(msgspec.json.encode(schema))
        if size > MAX_SCHEMA_BYTES:
            allowed = f"a schema of at most {MAX_SCHEMA_BYTES:,} bytes, or strict: false"
            raise InvalidParameter(f"{function}.parameters", schema, allowed)
        num_bytes += size
        if num_bytes > MAX_SCHEMA_BYTES:  # before more of them are taken apart
            allowed = (
                f"strict tools with schemas of at most {MAX_SCHEMA_BYTES:,} bytes together; "
                f"up to tools[{place}] they have {num_bytes:,}"
            )
            raise InvalidParameter("tools", body.tools, allowed)
        if not _is_held(tool, texts) or "structured_outputs" in body.sampling():
            body.loosen(index)
            body.ignore(BEST_EFFORT)


def strict_form(body: ChatBody, format_: Format) -> dict[str, Any]:
    """Return the sampling parameter that holds calls to their tools, after ``check_strict``; none
    where no tool is held. Raises InvalidParameter for tools that together are described at too
    great a length."""
    texts, tools = _texts_of(format_), _tools(body)
    held = [_is_strict(tool) and not body.is_loose(at) for at, tool in enumerate(tools)]
    if not (texts and any(held)):
        return {}
    functions = [
        {**tool["function"], "strict": is_held} for tool, is_held in zip(tools, held, strict=True)
    ]
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


def _is_held(tool: Mapping[str, Any], texts: Sequence[CallText]) -> bool:
    """Return whether a grammar can hold calls of a strict tool to its schema."""
    try:
        for text in texts:
            _content(tool["function"], text)
    except NotFollowed:
        return False
    return bool(texts)


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
