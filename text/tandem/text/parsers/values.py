"""Conversion of plain values to JSON of the type in a tool's schema."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
_MAX_NUMBER = 512
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\r\n]+")
_LITERAL = re.compile(r"[-+.\w]+", re.ASCII)
_WHOLE = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null", re.ASCII)
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """Reader of one JSON value."""

    __slots__ = ("_held", "_is_key", "_mode", "_stack", "done", "failed")

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._mode = self._value
        self._stack: list[str] = []
        self._held = ""
        self._is_key = False

    @property
    def in_text(self) -> bool:
        return self._mode in (self._string, self._escape, self._hex)

    def copy(self) -> JsonScanner:
        other = JsonScanner()
        other.done, other.failed = self.done, self.failed
        other._mode = getattr(other, self._mode.__name__)
        other._stack = list(self._stack)
        other._held, other._is_key = self._held, self._is_key
        return other

    def rest(self) -> str | None:
        """Return the text that completes the value; None if closing marks do not."""
        closing = "".join("}" if each == "{" else "]" for each in reversed(self._stack))
        if self.in_text and not self._is_key:
            return f'"{closing}'
        if self._mode == self._literal and _WHOLE.fullmatch(self._held):
            return self._held + closing
        return closing if self._mode in (self._after, self._first_key, self._first_item) else None

    def feed(self, text: str, at: int, end: int | None = None) -> tuple[int, str]:
        """Read ``text`` from ``at``. Return the position reached, and the JSON read."""
        end = len(text) if end is None else end
        out: list[str] = []
        while at < end and not (self.done or self.failed):
            at = self._mode(text, at, end, out)
        return at, "".join(out)

    def _value(self, text: str, at: int, end: int, out: list[str]) -> int:
        at = _skip(text, at, end, out)
        if at == end:
            return at
        char = text[at]
        if char == '"':
            return self._open_string(at, out, is_key=False)
        if char in "{[":
            if len(self._stack) == MAX_DEPTH:
                return self._fail(at)
            self._stack.append(char)
            self._mode = self._first_key if char == "{" else self._first_item
            out.append(char)
            return at + 1
        if _LITERAL.match(char) is None:
            return self._fail(at)
        self._held = ""
        self._mode = self._literal
        return at

    def _first_item(self, text: str, at: int, end: int, out: list[str]) -> int:
        at = _skip(text, at, end, out)
        if at < end and text[at] == "]":
            return self._close(at, "]", out)
        self._mode = self._value if at < end else self._first_item
        return at

    def _first_key(self, text: str, at: int, end: int, out: list[str]) -> int:
        at = _skip(text, at, end, out)
        if at < end and text[at] == "}":
            return self._close(at, "}", out)
        self._mode = self._key if at < end else self._first_key
        return at

    def _key(self, text: str, at: int, end: int, out: list[str]) -> int:
        at = _skip(text, at, end, out)
        if at == end:
            return at
        return self._open_string(at, out, is_key=True) if text[at] == '"' else self._fail(at)

    def _colon(self, text: str, at: int, end: int, out: list[str]) -> int:
        at = _skip(text, at, end, out)
        if at == end:
            return at
        if text[at] != ":":
            return self._fail(at)
        out.append(":")
        self._mode = self._value
        return at + 1

    def _after(self, text: str, at: int, end: int, out: list[str]) -> int:
        at = _skip(text, at, end, out)
        if at == end:
            return at
        opened = self._stack[-1]
        if text[at] == ",":
            out.append(",")
            self._mode = self._key if opened == "{" else self._value
            return at + 1
        closing = "}" if opened == "{" else "]"
        return self._close(at, closing, out) if text[at] == closing else self._fail(at)

    def _close(self, at: int, char: str, out: list[str]) -> int:
        self._stack.pop()
        out.append(char)
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._mode = self._after
        self.done = not self._stack

    def _open_string(self, at: int, out: list[str], *, is_key: bool) -> int:
        self._is_key = is_key
        self._mode = self._string
        out.append('"')
        return at + 1

    def _string(self, text: str, at: int, end: int, out: list[str]) -> int:
        run = _PLAIN.match(text, at, end)
        if run is not None:
            out.append(run[0])
            return run.end()
        char = text[at]
        if char == '"':
            out.append(char)
            if self._is_key:
                self._mode = self._colon
            else:
                self._end_value()
        elif char == "\\":
            self._mode = self._escape
        else:
            out.append(json.dumps(char)[1:-1])
        return at + 1

    def _escape(self, text: str, at: int, end: int, out: list[str]) -> int:
        char = text[at]
        self._mode = self._string
        if char in '"\\/bfnrt':
            out.append("\\" + char)
        elif char == "u":
            self._held = "\\u"
            self._mode = self._hex
        else:
            out.append("\\\\")
            return at
        return at + 1

    def _hex(self, text: str, at: int, end: int, out: list[str]) -> int:
        if text[at] not in _HEX:
            out.append("\\" + self._held)
            self._mode = self._string
            return at
        self._held += text[at]
        if len(self._held) == len("\\u0000"):
            out.append(self._held)
            self._mode = self._string
        return at + 1

    def _literal(self, text: str, at: int, end: int, out: list[str]) -> int:
        run = _LITERAL.match(text, at, end)
        if run is not None:
            room = _MAX_NUMBER - len(self._held)
            self._held += run[0][:room]
            return run.end() if len(run[0]) <= room else self._fail(at + room)
        if _WHOLE.fullmatch(self._held) is None:
            return self._fail(at)
        out.append(self._held)
        self._end_value()
        return at

    def _fail(self, at: int) -> int:
        self.failed = True
        return at


def _skip(text: str, at: int, end: int, out: list[str]) -> int:
    run = _SPACE.match(text, at, end)
    if run is None:
        return at
    out.append(run[0])
    return run.end()


_INTEGER = re.compile(r"[-+]?\d{1,400}", re.ASCII)
_NUMBER = re.compile(r"[-+]?(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:[eE][-+]?\d{1,3})?", re.ASCII)
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_MAX_LOOKS = 256
_MAX_LITERAL = 100_000
_DEFINED = re.compile(r"#/(\$defs|definitions)/([^/]+)")
DEFINED_STRING = "defined string"
"""Result of ``types_of`` for a string that is defined elsewhere.

Some models and grammars write it as JSON, with its quotes; others without.
"""


def types_of(schema: object, root: object = None) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty if it does not name them all.

    References are looked up in ``root``. A string behind a reference is ``DEFINED_STRING``.
    """
    types: set[str] = set()
    waiting: list[tuple[object, bool]] = [(schema, False)]
    followed: set[str] = set()
    for _ in range(_MAX_LOOKS):
        if not waiting:
            return frozenset(types - {"string"} if DEFINED_STRING in types else types)
        each, is_defined = waiting.pop()
        if not isinstance(each, Mapping):
            break
        own, several, to = _own_types(each), _several(each), each.get("$ref")
        if own:
            types |= own
            if is_defined and "string" in own:
                types.add(DEFINED_STRING)
        elif several is not None:
            waiting += [(one, is_defined) for one in several[:_MAX_LOOKS]]
        elif not isinstance(to, str):
            break
        elif to not in followed:
            followed.add(to)
            waiting.append((_definition(to, root), True))
    return frozenset()


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    kind = schema.get("type")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    if "anyOf" in schema or "oneOf" in schema or not isinstance(values, list):
        return frozenset()
    is_text = bool(values) and all(isinstance(each, str) for each in values)
    return frozenset({"string"}) if is_text else frozenset()


def _several(schema: Mapping[str, Any]) -> list[Any] | None:
    lists = (schema.get(name) for name in ("anyOf", "oneOf"))
    return next((each for each in lists if isinstance(each, list)), None)


def _definition(to: str, root: object) -> object:
    place = _DEFINED.fullmatch(to)
    room = root.get(place[1]) if place is not None and isinstance(root, Mapping) else None
    return room.get(place[2]) if place is not None and isinstance(room, Mapping) else None


def as_json(text: str, types: frozenset[str]) -> str:
    """Return ``text`` as JSON of one of ``types`` if possible, else as a string."""
    bare = text.strip()
    word = _WORDS.get(bare.lower())
    if word == "null" and ("null" in types or not types):
        return "null"
    if word in ("true", "false") and ("boolean" in types or not types):
        return word
    if "integer" in types and _INTEGER.fullmatch(bare):
        return str(int(bare))
    if "number" in types and _NUMBER.fullmatch(bare):
        return _number(bare)
    begins = ("[", "{") if types & {"object", "array"} else ()
    any_json = not types or (begins and not types & {"string", DEFINED_STRING})
    if DEFINED_STRING in types:
        begins = (*begins, '"')
    if any_json or bare.startswith(begins):
        found = _parsed(bare)
        if found is not None:
            return found
    return json.dumps(text, ensure_ascii=False)


def _number(text: str) -> str:
    if _INTEGER.fullmatch(text):
        return str(int(text))
    value = float(text)
    return json.dumps(value) if abs(value) != float("inf") else json.dumps(text)


def _parsed(text: str) -> str | None:
    """Return a value written as JSON or as a Python literal; None if it is neither."""
    try:
        found = json.dumps(_value(text), ensure_ascii=False, allow_nan=False)
        found.encode()
        return found
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _value(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse)
    except ValueError:
        if not text.startswith(("[", "{")) or len(text) > _MAX_LITERAL:
            raise
    value = ast.literal_eval(text)
    if not _is_json(value):
        raise ValueError(text)
    return value


def _is_json(value: object) -> bool:
    """Return whether a value is the same in JSON: no tuples, sets or bytes, only text keys."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float)


def _refuse(word: str) -> None:
    raise ValueError(word)
