"""Calls of one answer: names, ids, arguments."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.text.parsers.cursor import Cursor
from tandem.text.parsers.events import ArgumentsDelta, CallBegun, CallEnded, Event
from tandem.text.parsers.values import types_of


def new_call_id() -> str:
    """Return a new id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ToolSchemas:
    """Schemas of a request's tools."""

    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON schemas of parameters, by tool and parameter name."""
    roots: Mapping[str, object] = field(default_factory=dict)
    """Schema of all arguments of each tool, with its definitions."""

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> ToolSchemas:
        """Return the schemas of definitions in OpenAI's form. Malformed parts count as unknown."""
        found: dict[str, Mapping[str, Any]] = {}
        roots: dict[str, object] = {}
        for tool in tools:
            function = tool.get("function")
            if not isinstance(function, Mapping):
                continue
            schema = function.get("parameters")
            named = schema.get("properties") if isinstance(schema, Mapping) else None
            name = str(function.get("name"))
            found[name] = named if isinstance(named, Mapping) else {}
            roots[name] = schema
        return cls(found, roots)


class Calls:
    """Writer of call events. After ``begin`` a text cannot become content."""

    __slots__ = ("_before", "_cursor", "_events", "_new_id", "count", "name", "open", "schemas")

    def __init__(
        self,
        cursor: Cursor,
        events: list[Event],
        schemas: ToolSchemas,
        new_id: Callable[[], str],
        before: Callable[[], None],
    ) -> None:
        """``before`` is called when a call begins, to write earlier events."""
        self._cursor = cursor
        self._events = events
        self._new_id = new_id
        self._before = before
        self.schemas = schemas
        self.count = 0
        self.open = False
        self.name = ""

    def begin(self, name: str, call_id: str | None = None) -> None:
        self._cursor.mark = None
        self._before()
        self.open = True
        self.name = name
        call_id = call_id if call_id is not None else self._new_id()
        self._events.append(CallBegun(self.count, call_id, name))

    def arguments(self, text: str) -> None:
        self._events.append(ArgumentsDelta(self.count, text))

    def end(self) -> None:
        """End the call, complete or not."""
        self._events.append(CallEnded(self.count))
        self.count += 1
        self.open = False

    def types(self, key: str) -> frozenset[str]:
        """Return the JSON types of a parameter of the open call; empty if unknown."""
        schema = self.schemas.parameters.get(self.name, {}).get(key)
        return types_of(schema, self.schemas.roots.get(self.name))
