"""Calls whose arguments are Python's literals, or Gemma's objects with bare keys."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tandem.text.parsers.calls import Calls
from tandem.text.parsers.cursor import (
    MAX_HELD,
    Cursor,
    Reading,
    at_bound,
    literal,
    name,
    spaces,
    stop_before,
    text_until,
    value_until,
)
from tandem.text.parsers.values import MAX_DEPTH

_CONSTANTS = {"true": True, "false": False, "null": None}
_WORD = re.compile(r"[-+.\w]{0,512}", re.ASCII)
_PARTS = re.compile(r"""[()\[\]{}"'\\]""")


@dataclass(frozen=True, slots=True)
class PythonCall:
    """``name(key=value, ...)``; its arguments are passed on when the call is complete."""

    marks: tuple[str, ...] = ()

    def read(self, cursor: Cursor, calls: Calls) -> Reading:
        called = yield from name(cursor)
        if not called or (yield from literal(cursor, ("(",))) is None:
            return False
        written = yield from _balanced(cursor)
        arguments = None if written is None else _keywords(written)
        if arguments is None:
            return False
        calls.begin(called)
        calls.arguments(arguments)
        return True


def _balanced(cursor: Cursor) -> Generator[None, None, str | None]:
    pieces: list[str] = []
    depth, size, quote, escaped = 1, 0, "", False
    stop = stop_before(cursor, cursor.bounds)
    while size < MAX_HELD:
        if cursor.pos == stop:
            if cursor.closed or (stop < len(cursor.text) and (yield from at_bound(cursor))):
                return None
            stop = stop_before(cursor, cursor.bounds)
            if cursor.pos == stop:
                yield
                stop = stop_before(cursor, cursor.bounds)
            continue
        char = cursor.text[cursor.pos]
        if not (quote or escaped):
            run = _PARTS.search(cursor.text, cursor.pos)
            end = stop if run is None else min(stop, run.start())
            if end > cursor.pos:
                end = min(end, cursor.pos + MAX_HELD - size)
                pieces.append(cursor.text[cursor.pos : end])
                size += end - cursor.pos
                cursor.pos = end
                continue
        cursor.pos += 1
        size += 1
        if quote:
            ends = char == quote and not escaped
            escaped = char == "\\" and not escaped
            quote = "" if ends else quote
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return "".join(pieces)
        pieces.append(char)
    return None


def _keywords(written: str) -> str | None:
    try:
        call = ast.parse(f"f({written}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            return None
        values = {str(each.arg): _value(each.value) for each in call.keywords if each.arg}
        if len(values) != len(call.keywords):
            return None
        found = json.dumps(values, ensure_ascii=False, allow_nan=False)
        found.encode()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return found


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(k): _value(v) for k, v in zip(node.keys, node.values, strict=True)}
    return ast.literal_eval(node)


def _key(node: ast.expr | None) -> str:
    value = None if node is None else ast.literal_eval(node)
    if not isinstance(value, str | int):
        raise ValueError("a key that JSON cannot have")
    return str(value)


@dataclass(frozen=True, slots=True)
class BareKeys:
    """``call:name{key:value,...}``, with a special mark around strings."""

    quote: str

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.quote,)

    def read(self, cursor: Cursor, calls: Calls) -> Reading:
        yield from spaces(cursor)
        if (yield from literal(cursor, ("call:",))) is None:
            return False
        called = yield from name(cursor)
        if not called or (yield from literal(cursor, ("{",))) is None:
            return False
        calls.begin(called)
        return (yield from self._object(cursor, calls, MAX_DEPTH))

    def _object(self, cursor: Cursor, calls: Calls, depth: int) -> Reading:
        calls.arguments("{")
        yield from spaces(cursor)
        if (yield from literal(cursor, ("}",))) is not None:
            calls.arguments("}")
            return True
        while True:
            yield from spaces(cursor)
            key: list[str] = []
            if (yield from literal(cursor, (self.quote,))) is not None:
                yield from text_until(cursor, (self.quote,), key.append, 128)
                colon = yield from literal(cursor, (":",))
            else:
                colon = yield from text_until(cursor, (":",), key.append, 128)
            if colon is None:
                return False
            bare = "".join(key).strip().strip('"')
            calls.arguments(json.dumps(bare, ensure_ascii=False) + ":")
            after = None
            if (yield from self._one(cursor, calls, depth)):
                yield from spaces(cursor)
                after = yield from literal(cursor, (",", "}"))
            if after is None:
                yield from _close_at_bound(cursor, calls, "}")
                return False
            calls.arguments(after)
            if after == "}":
                return True

    def _list(self, cursor: Cursor, calls: Calls, depth: int) -> Reading:
        calls.arguments("[")
        yield from spaces(cursor)
        if (yield from literal(cursor, ("]",))) is not None:
            calls.arguments("]")
            return True
        while True:
            after = None
            if (yield from self._one(cursor, calls, depth)):
                yield from spaces(cursor)
                after = yield from literal(cursor, (",", "]"))
            if after is None:
                yield from _close_at_bound(cursor, calls, "]")
                return False
            calls.arguments(after)
            if after == "]":
                return True

    def _one(self, cursor: Cursor, calls: Calls, depth: int) -> Reading:
        yield from spaces(cursor)
        opened = yield from literal(cursor, (self.quote, '"', "{", "["))
        if opened in (self.quote, '"'):
            calls.arguments('"')
            found = yield from value_until(cursor, (str(opened),), partial(_escaped, calls))
            calls.arguments('"')
            return found == opened
        if opened is not None:
            inner = self._object if opened == "{" else self._list
            return depth > 0 and (yield from inner(cursor, calls, depth - 1))
        word = yield from _word(cursor)
        if not word:
            return False
        calls.arguments(_plain(word))
        return True


def _close_at_bound(cursor: Cursor, calls: Calls, close: str) -> Generator[None, None, None]:
    if (yield from at_bound(cursor)):
        calls.arguments(close)


def _word(cursor: Cursor) -> Generator[None, None, str]:
    while True:
        run = _WORD.match(cursor.text, cursor.pos)
        assert run is not None, "it matches nothing, too"
        if run.end() < len(cursor.text) or cursor.closed or len(run[0]) == 512:
            cursor.pos = run.end()
            return run[0]
        yield


def _plain(word: str) -> str:
    try:
        value = json.loads(word)
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(word)


def _escaped(calls: Calls, text: str) -> None:
    calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
