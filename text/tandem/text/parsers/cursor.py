"""Position in a text that is still being generated, and functions that read from it.

Readers are generators: they yield until there is enough text, so the result does not depend on how
the text is split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache

from tandem.text.parsers.values import JsonScanner

Reading = Generator[None, None, bool]
"""Generator that yields to wait for text; returns whether it read its item."""
MAX_HELD = 16_384
"""Maximum characters held until it is known whether they are a call."""
MAX_NAME = 128
_SPACES = re.compile(r"[ \t\r\n]{0,64}")
_MAX_SPACES = 64
_NAME = re.compile(rf"[\w.\-:/]{{0,{MAX_NAME}}}")


class Cursor:
    """Text that has arrived and was not read yet."""

    __slots__ = ("closed", "closes", "mark", "opens", "pos", "text")

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.mark: int | None = None
        """Start of the text that is kept, to be restored if it is not a call."""
        self.closed = False
        self.opens: tuple[str, ...] = ()
        """Texts that begin a call or region, and so end the open call."""
        self.closes: tuple[str, ...] = ()
        """Texts that end the open call or its region."""

    @property
    def bounds(self) -> tuple[str, ...]:
        """Return all texts that delimit a call."""
        return (*self.opens, *self.closes)

    def add(self, text: str) -> None:
        """Append text, and drop text that was read and is not kept."""
        keep = self.pos if self.mark is None else self.mark
        self.text = self.text[keep:] + text
        self.pos -= keep
        if self.mark is not None:
            self.mark = 0

    @property
    def limit(self) -> int:
        """Return the position at which reading must stop while text is kept."""
        return len(self.text) if self.mark is None else min(len(self.text), self.mark + MAX_HELD)

    @property
    def full(self) -> bool:
        """Return whether the limit of kept text is reached."""
        return self.mark is not None and self.pos >= self.mark + MAX_HELD


def literal(cursor: Cursor, options: Sequence[str]) -> Generator[None, None, str | None]:
    """Read one of ``options``, none of which is a prefix of another.

    Return None and read nothing if none matches. An empty option never matches.
    """
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
    """Read white space, up to a bound."""
    while True:
        run = _SPACES.match(cursor.text, cursor.pos)
        assert run is not None, "it matches nothing, too"
        whole = run.end() < len(cursor.text) or len(run[0]) == _MAX_SPACES
        if whole or cursor.closed:
            cursor.pos = run.end()
            return
        yield


def name(cursor: Cursor) -> Generator[None, None, str]:
    """Read a name; empty if it is invalid or too long."""
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
    """Pass on text up to one of ``closes`` and read that.

    Return None if it does not come within ``most`` characters.
    """
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
    """Return the start of text that may still become one of the closing texts."""
    size = len(cursor.text)
    if cursor.closed:
        return size
    for start in range(max(cursor.pos, size - longest + 1), size):
        if cursor.text[start:] in beginnings:
            return start
    return size


def value_until(
    cursor: Cursor,
    ends: tuple[str, ...],
    say: Callable[[str], None],
    *,
    opens: tuple[str, ...] = (),
    closes: tuple[str, ...] = (),
    most: int | None = None,
) -> Generator[None, None, str | None]:
    """Read a value in a call as ``text_until``.

    A bound of the call, or one of ``opens`` and ``closes``, also ends it and is read next. A value
    contains a closing text if an end comes before anything opens.
    """
    opens, closes = (*opens, *cursor.opens), (*closes, *cursor.closes)
    left = most

    def counted(text: str) -> None:
        nonlocal left
        left = None if left is None else left - len(text)
        say(text)

    while True:
        found = yield from text_until(cursor, (*ends, *opens, *closes), counted, left)
        if found is None or found in ends:
            return found
        cursor.pos -= len(found)
        if found in opens:
            return found
        ended = yield from _held_until(cursor, found, ends, opens, counted)
        if ended is not None:
            return ended


def _held_until(
    cursor: Cursor,
    close: str,
    ends: tuple[str, ...],
    opens: tuple[str, ...],
    say: Callable[[str], None],
) -> Generator[None, None, str | None]:
    """Return the end of a value that contains ``close``: that, or a later end.

    None if the value exceeds the limit.
    """
    assert cursor.mark is None
    cursor.mark = cursor.pos
    cursor.pos += len(close)
    found = yield from text_until(cursor, (*ends, *opens), _pass, MAX_HELD)
    start = cursor.mark
    cursor.mark = None
    is_value = found in ends or (found is None and cursor.pos < len(cursor.text))
    if is_value:
        say(cursor.text[start : cursor.pos - len(found or "")])
        return found
    cursor.pos = start
    return close


def _pass(_: str) -> None:
    """Ignore the text."""


def stop_before(cursor: Cursor, bounds: tuple[str, ...]) -> int:
    """Return the position at which one of ``bounds`` may begin, else the text's end."""
    find, beginnings, longest = _closes(bounds)
    found = find(cursor.text, cursor.pos)
    return _undecided(cursor, beginnings, longest) if found is None else found.start()


def at_bound(cursor: Cursor) -> Reading:
    """Return whether a bound of the call comes next."""
    found = yield from literal(cursor, tuple(dict.fromkeys(cursor.bounds)))
    cursor.pos -= len(found or "")
    return found is not None


def scan(cursor: Cursor, say: Callable[[str], None]) -> Reading:
    """Pass on one JSON value as it arrives. If a bound interrupts it, it is closed."""
    scanner = yield from _scan(cursor, say, None)
    if scanner.done or scanner.failed or cursor.full or cursor.pos == len(cursor.text):
        return scanner.done
    rest = scanner.rest()
    say(rest or "")
    return rest is not None


def captured(cursor: Cursor) -> Generator[None, None, str | None]:
    """Return one JSON value as a text; None if it is invalid or too long."""
    pieces: list[str] = []
    scanner = yield from _scan(cursor, pieces.append, MAX_HELD)
    return "".join(pieces).strip() if scanner.done else None


def _scan(
    cursor: Cursor, say: Callable[[str], None], most: int | None
) -> Generator[None, None, JsonScanner]:
    find, beginnings, longest = _closes(cursor.bounds)
    scanner = JsonScanner()
    left = most
    while True:
        bound = find(cursor.text, cursor.pos)
        end = _undecided(cursor, beginnings, longest) if bound is None else bound.start()
        end = min(end, cursor.limit)
        if left is not None:
            end = min(end, cursor.pos + left)
        start = cursor.pos
        cursor.pos, piece = scanner.feed(cursor.text, start, end)
        left = None if left is None else left - (cursor.pos - start)
        if piece:
            say(piece)
        if scanner.done or scanner.failed or cursor.full or left == 0:
            return scanner
        if bound is not None and cursor.pos == bound.start():
            inside = (yield from _inside(cursor, scanner)) if scanner.in_text else None
            if inside is None:
                return scanner
            scanner, piece = inside
            left = None if left is None else max(0, left - len(piece))
            say(piece)
            continue
        if cursor.closed:
            return scanner
        yield


def _inside(
    cursor: Cursor, scanner: JsonScanner
) -> Generator[None, None, tuple[JsonScanner, str] | None]:
    """Read a JSON text that contains a bound, and what follows it.

    Return None and read nothing if the bound ends the call.
    """
    had_mark = cursor.mark is not None
    if cursor.mark is None:
        cursor.mark = cursor.pos
    offset = cursor.pos - cursor.mark
    ahead, inner, pieces = 0, scanner.copy(), []
    found: bool | None = None
    while found is None:
        at = cursor.mark + offset + ahead
        if at == len(cursor.text):
            if cursor.closed:
                found = False
                continue
            yield
            continue
        was_in_text = inner.in_text
        _, piece = inner.feed(cursor.text, at, at + 1)
        pieces.append(piece)
        ahead += 1
        goes_on = not was_in_text and not cursor.text[at].isspace()
        if inner.failed:
            found = False
        elif inner.done or goes_on or ahead == MAX_HELD:
            found = True
    cursor.pos = cursor.mark + offset + (ahead if found else 0)
    if not had_mark:
        cursor.mark = None
    return (inner, "".join(pieces)) if found else None
