"""Streaming search for the end of a JSON value, which passes on the text that was read.

Common errors of models within a string (a bare line feed, an invalid escape) are passed on escaped.
Any other invalid JSON ends the scan.
"""

from __future__ import annotations

import json
import re

MAX_DEPTH = 64
"""Maximum nesting of objects and lists."""
_MAX_LITERAL = 512
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\r\n]+")
_LITERAL = re.compile(r"[-+.\w]+", re.ASCII)
_WHOLE = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null", re.ASCII)
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """Reader of one value, and nothing after it."""

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
        """Return whether a text is open."""
        return self._mode in (self._string, self._escape, self._hex)

    def copy(self) -> JsonScanner:
        """Return an independent scanner in the same state."""
        other = JsonScanner()
        other.done, other.failed = self.done, self.failed
        other._mode = getattr(other, self._mode.__name__)
        other._stack = list(self._stack)
        other._held, other._is_key = self._held, self._is_key
        return other

    def rest(self) -> str | None:
        """Return the text that completes the value passed on; None if closing marks do not."""
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
            room = _MAX_LITERAL - len(self._held)
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
