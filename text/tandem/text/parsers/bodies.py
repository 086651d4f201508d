"""Bodies of calls: one class for each syntax.

``read`` returns True if a call was read completely. False before ``calls.begin`` means that the
text is not a call; after it, that the call is incomplete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tandem.text.parsers.calls import Calls
from tandem.text.parsers.cursor import (
    MAX_HELD,
    MAX_NAME,
    Cursor,
    Reading,
    captured,
    literal,
    name,
    scan,
    spaces,
    text_until,
    value_until,
)
from tandem.text.parsers.values import as_json


class Body(Protocol):
    """A syntax of calls."""

    def read(self, cursor: Cursor, calls: Calls) -> Reading: ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Return texts that may be special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class JsonCall:
    """``{"name": ..., "arguments": {...}}``, in either order, with any other keys."""

    needs_arguments: bool = False
    """Whether a call requires arguments, for formats without marks."""
    known_only: bool = False
    """Whether a call requires the name of a known tool."""

    @property
    def marks(self) -> tuple[str, ...]:
        return ()

    def read(self, cursor: Cursor, calls: Calls) -> Reading:
        if (yield from literal(cursor, ("{",))) is None:
            return False
        found = _Found()
        while True:
            key = yield from _key(cursor)
            if key is None or not (yield from self._member(key, found, cursor, calls)):
                return False
            yield from spaces(cursor)
            after = yield from literal(cursor, (",", "}"))
            if after != ",":
                return after is not None and self._whole(found, calls)

    def _member(self, key: str, found: _Found, cursor: Cursor, calls: Calls) -> Reading:
        if key == "name" and found.name is None:
            return (yield from self._name(found, cursor, calls))
        if key in ("arguments", "parameters") and not calls.open and found.early is None:
            return (yield from _read_arguments(found, cursor, calls))
        return (yield from captured(cursor)) is not None

    def _name(self, found: _Found, cursor: Cursor, calls: Calls) -> Reading:
        found.name = _text((yield from captured(cursor)) or "")
        if not (found.name and len(found.name) <= MAX_NAME and found.name.isprintable()):
            return False
        if self.known_only and found.name not in calls.schemas.parameters:
            return False
        if found.early is not None:
            calls.begin(found.name)
            calls.arguments(found.early)
        return True

    def _whole(self, found: _Found, calls: Calls) -> bool:
        if calls.open:
            return True
        if found.name is None or self.needs_arguments:
            return False
        calls.begin(found.name)
        calls.arguments("{}")
        return True


@dataclass(slots=True)
class _Found:
    """Parts of a call that were read."""

    name: str | None = None
    early: str | None = None
    """Arguments that came before the name."""


def _read_arguments(found: _Found, cursor: Cursor, calls: Calls) -> Reading:
    if found.name is not None and cursor.text[cursor.pos] == "{":
        calls.begin(found.name)
        return (yield from scan(cursor, calls.arguments))
    found.early = _arguments((yield from captured(cursor)))
    if found.early is not None and found.name is not None:
        calls.begin(found.name)
        calls.arguments(found.early)
    return found.early is not None


def _key(cursor: Cursor) -> Generator[None, None, str | None]:
    yield from spaces(cursor)
    key = _text((yield from captured(cursor)) or "")
    yield from spaces(cursor)
    if key is None or (yield from literal(cursor, (":",))) is None:
        return None
    yield from spaces(cursor)
    while cursor.pos == len(cursor.text) and not cursor.closed:
        yield
    return key if cursor.pos < len(cursor.text) else None


def _text(value: str) -> str | None:
    return json.loads(value) if value.startswith('"') else None


def _arguments(value: str | None) -> str | None:
    """Return arguments that came before the name, or as JSON within a text."""
    if value is None or value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    inner = _text(value)
    try:
        whole = inner is not None and inner.encode() and isinstance(json.loads(inner), dict)
        return inner if whole else None
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class NamedJson:
    """Name, separator, and arguments as JSON."""

    separators: tuple[str, ...] = ()
    before: str = ""
    after: str = ""
    name_prefix: str = ""
    """Prefix of names that belongs to the id only."""
    says_id: bool = False
    """Whether the name is written as ``prefix name:number``, which is also the id."""
    id_mark: str = ""
    """Optional text between the name and the call's id."""
    bare: bool = False
    """Whether arguments may follow the name directly."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.separators, self.before, self.id_mark)

    def read(self, cursor: Cursor, calls: Calls) -> Reading:
        yield from spaces(cursor)
        if self.before and (yield from literal(cursor, (self.before,))) is None:
            return False
        written = yield from name(cursor)
        called, call_id = self._named(written)
        if not called:
            return False
        yield from spaces_if(cursor, "\n" not in "".join(self.separators))
        if self.id_mark and (yield from literal(cursor, (self.id_mark,))) is not None:
            call_id = (yield from name(cursor)) or None
        separator = yield from literal(cursor, self.separators)
        if separator is None and not self.bare:
            return False
        yield from spaces(cursor)
        if (yield from literal(cursor, ("{",))) is None:
            return False
        cursor.pos -= 1
        calls.begin(called, call_id)
        whole = yield from scan(cursor, calls.arguments)
        if whole and self.after:
            yield from spaces(cursor)
            yield from literal(cursor, (self.after,))
        return whole

    def _named(self, written: str) -> tuple[str, str | None]:
        if not self.says_id:
            return written, None
        called, colon, number = written.rpartition(":")
        if not (colon and number.isdecimal()):
            called = written
        called = called.removeprefix(self.name_prefix)
        return called, written if colon else None


def spaces_if(cursor: Cursor, wanted: bool) -> Generator[None, None, None]:
    """Read white space if ``wanted``."""
    if wanted:
        yield from spaces(cursor)


@dataclass(frozen=True, slots=True)
class TaggedParameters:
    """Name, and parameters between tags. Values become JSON by the tool's schema."""

    name_end: tuple[str, ...]
    """Texts that end the name; if empty, a line end or the next tag does."""
    open: str
    """Text that begins a parameter's name."""
    key_end: str
    value_open: str
    """Text that begins its value; if empty, ``key_end`` does."""
    value_end: str
    end: str
    pad: str = "\n"
    """Optional text around a value; empty if a value keeps its line ends."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.open, self.key_end, self.value_open, self.value_end, self.end, *self.name_end)

    def read(self, cursor: Cursor, calls: Calls) -> Reading:
        yield from spaces(cursor)
        called = yield from name(cursor)
        if not called:
            return False
        if self.name_end:
            if (yield from literal(cursor, self.name_end)) is None:
                return False
        elif not (yield from self._tag_follows(cursor)):
            return False
        calls.begin(called)
        calls.arguments("{")
        first = True
        while True:
            yield from spaces(cursor)
            tag = yield from literal(cursor, (self.open, self.end))
            if tag != self.open:
                calls.arguments("}")
                return tag is not None
            written = yield from self._parameter(cursor, calls, first)
            if written is False:
                return False
            first = first and written is None

    def _tag_follows(self, cursor: Cursor) -> Reading:
        yield from spaces(cursor)
        tag = yield from literal(cursor, (self.open, self.end))
        cursor.pos -= len(tag or "")
        return tag is not None

    def _parameter(
        self, cursor: Cursor, calls: Calls, first: bool
    ) -> Generator[None, None, bool | None]:
        """Read one parameter. Return whether it was complete, or None if nothing of it was
        written.
        """
        key: list[str] = []
        stops = (self.end, *cursor.bounds)
        ended = yield from text_until(cursor, (self.key_end, *stops), key.append, MAX_NAME)
        if ended is None:
            calls.arguments("}")
            return False
        if ended != self.key_end:
            cursor.pos -= len(ended)
            return None
        if self.value_open:
            yield from spaces(cursor)
            if (yield from literal(cursor, (self.value_open,))) is None:
                return None
        named = "".join(key).strip()
        calls.arguments(("" if first else ", ") + json.dumps(named, ensure_ascii=False) + ": ")
        yield from literal(cursor, (self.pad,))
        types = calls.types(named)
        if types == {"string"}:
            calls.arguments('"')
            found = yield from self._value(cursor, partial(_escaped, calls))
            calls.arguments('"')
        else:
            held: list[str] = []
            found = yield from self._value(cursor, held.append, MAX_HELD)
            value = "".join(held)
            if found is None and len(value) >= MAX_HELD:
                found = yield from self._long(value, types, cursor, calls)
            else:
                calls.arguments(as_json(value, types))
        if found is None:
            calls.arguments("}")
        return found is not None

    def _value(
        self, cursor: Cursor, say: Callable[[str], None], most: int | None = None
    ) -> Generator[None, None, str | None]:
        """Read a value up to its end, or to the next tag or bound; None if neither comes."""
        found = yield from value_until(
            cursor,
            self._padded(self.value_end),
            say,
            opens=self._padded(self.open, *cursor.opens),
            closes=self._padded(self.end, *cursor.closes),
            most=most,
        )
        if found is not None and not found.endswith(self.value_end):
            yield from literal(cursor, (self.pad,))
        return found

    def _padded(self, *texts: str) -> tuple[str, ...]:
        pads = (self.pad, "") if self.pad else ("",)
        return tuple(pad + each for pad in pads for each in texts)

    def _long(
        self, begun: str, types: frozenset[str], cursor: Cursor, calls: Calls
    ) -> Generator[None, None, str | None]:
        """Read the rest of a value that is too long to hold until its type is known.

        It is written as JSON if its schema allows only an object or array, else as a string.
        """
        if types and types <= {"object", "array"}:
            calls.arguments(begun)
            return (yield from self._value(cursor, calls.arguments))
        calls.arguments('"')
        _escaped(calls, begun)
        found = yield from self._value(cursor, partial(_escaped, calls))
        calls.arguments('"')
        return found


def _escaped(calls: Calls, text: str) -> None:
    calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
