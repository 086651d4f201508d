"""A place in a text that is still coming, and how to read from it without deciding too early.

Readers are generators: they yield where what is there does not decide, and are resumed with more.
So a text is read the same however it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache

from tandem.text.parsers.json_scanner import JsonScanner

Reading = Generator[None, None, bool]
"""Waits for text by yielding; whether it read what it was to read."""
MAX_HELD = 16_384
"""Characters that may wait until it is known whether they are a call."""
MAX_NAME = 128
"""Characters of a tool's name or of a parameter's."""
_SPACES = re.compile(r"[ \t\r\n]{0,64}")
_MAX_SPACES = 64
_NAME = re.compile(rf"[\w.\-:/]{{0,{MAX_NAME}}}")


class Cursor:
    """What came and was not read yet."""

    __slots__ = ("closed", "mark", "pos", "text")

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.mark: int | None = None
        """From where on text is kept, to be given back should it be no call."""
        self.closed = False
        """Nothing follows."""

    def add(self, text: str) -> None:
        """More has come; what was read and is not kept is forgotten."""
        keep = self.pos if self.mark is None else self.mark
        self.text = self.text[keep:] + text
        self.pos -= keep
        if self.mark is not None:
            self.mark = 0

    @property
    def limit(self) -> int:
        """Where reading must stop while text is kept."""
        return len(self.text) if self.mark is None else min(len(self.text), self.mark + MAX_HELD)

    @property
    def full(self) -> bool:
        """Whether no more may be kept."""
        return self.mark is not None and self.pos >= self.mark + MAX_HELD


def literal(cursor: Cursor, options: Sequence[str]) -> Generator[None, None, str | None]:
    """Read one of ``options``, of which none begins another; None, and nothing is read, if it is
    none of them. An empty option is none: it would be waited for to the end."""
    longest = max(map(len, options), default=0)
    while True:
        rest = cursor.text[cursor.pos : cursor.pos + longest]
        for option in options:
            if option and rest.startswith(option):
                cursor.pos += len(option)
                return option
        if cursor.closed or not any(each.startswith(rest) for each in options if each):
            return None
        yield


def spaces(cursor: Cursor) -> Generator[None, None, None]:
    """Read white space, as far as anybody writes it."""
    while True:
        run = _SPACES.match(cursor.text, cursor.pos)
        assert run is not None, "it matches nothing, too"
        whole = run.end() < len(cursor.text) or len(run[0]) == _MAX_SPACES
        if whole or cursor.closed:
            cursor.pos = run.end()
            return
        yield


def name(cursor: Cursor) -> Generator[None, None, str]:
    """Read what may be a name; empty if it is none, or too long."""
    while True:
        run = _NAME.match(cursor.text, cursor.pos)
        assert run is not None, "it matches nothing, too"
        if len(run[0]) == MAX_NAME:
            return ""
        if run.end() < len(cursor.text) or cursor.closed:
            cursor.pos = run.end()
            return run[0]
        yield


def text_until(
    cursor: Cursor, closes: tuple[str, ...], say: Callable[[str], None], most: int | None = None
) -> Generator[None, None, str | None]:
    """Pass on text up to one of ``closes`` and read that; None where it never comes, or ``most``
    characters did not hold it."""
    find, beginnings, longest = _closes(closes)
    left = most
    while True:
        found = find(cursor.text, cursor.pos)
        end = found.start() if found is not None else _undecided(cursor, beginnings, longest)
        if left is not None and end - cursor.pos > left:
            say(cursor.text[cursor.pos : cursor.pos + left])
            cursor.pos += left
            return None
        if end > cursor.pos:
            say(cursor.text[cursor.pos : end])
            left = None if left is None else left - (end - cursor.pos)
            cursor.pos = end
        if found is not None:
            cursor.pos = found.end()
            return found[0]
        if cursor.closed:
            return None
        yield


@lru_cache(maxsize=256)
def _closes(
    closes: tuple[str, ...],
) -> tuple[Callable[[str, int], re.Match[str] | None], frozenset[str], int]:
    pattern = re.compile("|".join(map(re.escape, closes)) or r"(?!)")
    beginnings = frozenset(each[:size] for each in closes for size in range(1, len(each)))
    return pattern.search, beginnings, max(map(len, closes), default=0)


def _undecided(cursor: Cursor, beginnings: frozenset[str], longest: int) -> int:
    """Where text begins that may still become one of the closing texts."""
    size = len(cursor.text)
    if cursor.closed:
        return size
    for start in range(max(cursor.pos, size - longest + 1), size):
        if cursor.text[start:] in beginnings:
            return start
    return size


def scan(cursor: Cursor, say: Callable[[str], None]) -> Reading:
    """Pass on one JSON value as it comes."""
    scanner = JsonScanner()
    while True:
        cursor.pos, piece = scanner.feed(cursor.text, cursor.pos, cursor.limit)
        if piece:
            say(piece)
        if scanner.done:
            return True
        if scanner.failed or cursor.closed or cursor.full:
            return False
        yield


def captured(cursor: Cursor) -> Generator[None, None, str | None]:
    """One JSON value as a text, or None; not more of it than may be held."""
    pieces: list[str] = []
    scanner = JsonScanner()
    size = 0
    while True:
        end = min(cursor.limit, cursor.pos + MAX_HELD - size)
        start = cursor.pos
        cursor.pos, piece = scanner.feed(cursor.text, cursor.pos, end)
        size += cursor.pos - start
        pieces.append(piece)
        if scanner.done:
            return "".join(pieces).strip()
        if scanner.failed or cursor.closed or cursor.full or size >= MAX_HELD:
            return None
        yield
