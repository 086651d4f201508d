"""Regular expressions that are followed rightly, written anew in plainer words.

outlines-core hands an expression to an engine that knows more than a grammar may mean, and puts a
pattern of a schema between two quotes as it is. Here it is read, whatever is not in the list is
refused by name, and what is written of it means the same to everybody: shorthands are ASCII where
they allow and Unicode where they forbid, and within JSON (``in_json``) each character is written as
JSON writes it.

Known: characters, ``.``, ``\\d \\w \\s \\D \\W \\S``, ``\\p{...}``, escapes (``\\n \\t \\r \\f \\v
\\xHH \\uHHHH \\x{...} \\u{...}`` and of signs), sets, groups, ``|``, ``* + ? {n} {n,} {n,m}``,
greedy or not, and ``^`` and ``$`` where an alternative of the whole begins and ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tandem.engine.structured.grammar import GrammarError
from tandem.engine.structured.outlines.characters import (
    JSON_TEXT,
    LINE_ENDS,
    NEVER,
    SHORTHANDS,
    Range,
    character,
    set_of,
    shorthand,
)

MAX_PARTS = 20_000
"""Characters and sets of an expression, its repetitions written out."""
MAX_GROUPS = 64
"""Groups in one another."""
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_QUANTIFIER = re.compile(r"[*+?]|\{([0-9]+)(?:(,)([0-9]*))?\}")
_UNCLEAR = re.compile(r"\{[\s\d,]*\}")
"""Braces that some engines read as a repetition and others as text."""
_MAX_DIGITS = 9
"""Digits of a repetition's count that are read; a larger count has too many parts."""
_MOST = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Expression:
    """What was read."""

    text: str
    """The expression of whole texts, in the words of the regex crate."""
    parts: int
    """How much it is, its repetitions written out."""


def read_whole(pattern: str) -> Expression:
    """An expression that a whole answer matches. Raises GrammarError."""
    return _Reader(pattern, in_json=False, search=False).read()


def read_search(pattern: str) -> Expression:
    """A schema's expression, which matches somewhere in a text, as the text stands between quotes
    of JSON. Raises GrammarError."""
    return _Reader(pattern, in_json=True, search=True).read()


class _Reader:
    """Reads one pattern, character by character."""

    def __init__(self, pattern: str, *, in_json: bool, search: bool) -> None:
        self._pattern = pattern
        self._at = 0
        self._in_json = in_json
        self._search = search
        self._depth = 0

    def read(self) -> Expression:
        """The whole of it."""
        if any("\ud800" <= sign <= "\udfff" or sign == NEVER for sign in self._pattern):
            raise GrammarError("an expression without NUL and half a character")
        texts, parts = list[str](), 0
        while True:
            begins = self._take("^")
            text, size = self._sequence(whole=True)
            ends = self._take("$")
            if self._search:
                text = f"{'' if begins else JSON_TEXT}{text}{'' if ends else JSON_TEXT}"
            texts.append(text)
            parts += size
            if not self._take("|"):
                break
        if self._at < len(self._pattern):
            raise self._error("an unopened group")
        _bounded(parts)
        return Expression(f"(?:{'|'.join(texts)})", parts)

    def _alternatives(self) -> tuple[str, int]:
        texts, parts = [], 0
        while True:
            text, size = self._sequence(whole=False)
            texts.append(text)
            parts += size
            if not self._take("|"):
                return f"(?:{'|'.join(texts)})", parts

    def _sequence(self, *, whole: bool) -> tuple[str, int]:
        texts, parts = list[str](), 0
        while self._at < len(self._pattern) and self._peek() not in "|)":
            if whole and self._peek() == "$" and self._pattern[self._at + 1 :][:1] in ("", "|"):
                break
            text, size = self._atom()
            low, high = self._quantifier()
            if (low, high) != (1, 1):
                most = "" if high is None else str(high)
                text = f"(?:{text}){{{low},{most}}}"
                size *= max(1, low + 1 if high is None else high)
            texts.append(text)
            parts += size
            _bounded(parts)
        return "".join(texts), parts

    def _quantifier(self) -> tuple[int, int | None]:
        found = _QUANTIFIER.match(self._pattern, self._at)
        if found is None:
            if unclear := _UNCLEAR.match(self._pattern, self._at):
                raise self._error(f"{unclear[0][:40]}, which is not a count or two in braces")
            return 1, 1
        self._at = found.end()
        if any(len(each.lstrip("0")) > _MAX_DIGITS for each in (found[1], found[3]) if each):
            raise _too_large()
        self._take("?")  # which of its texts is found first is no matter here
        if self._peek() in ("*", "+", "?") or _QUANTIFIER.match(self._pattern, self._at):
            raise self._error("a repetition of a repetition without a group, or one that keeps all")
        match found[0]:
            case "*":
                return 0, None
            case "+":
                return 1, None
            case "?":
                return 0, 1
        low = int(found[1])
        high = low if found[2] is None else int(found[3]) if found[3] else None
        if high is not None and high < low:
            raise self._error(f"{found[0]}, whose bounds are the wrong way round")
        return low, high

    def _atom(self) -> tuple[str, int]:
        sign = self._next()
        match sign:
            case "(":
                return self._group()
            case "[":
                return self._set(), 1
            case ".":
                return self._set_of(False, list(LINE_ENDS), []), 1
            case "\\":
                return self._escape(), 1
            case "^" | "$":
                raise self._error(f"{sign} elsewhere than where an alternative of the whole ends")
            case "*" | "+" | "?":
                raise self._error(f"{sign} with nothing to repeat")
            case "{" if _UNCLEAR.match(self._pattern, self._at - 1):
                raise self._error("{ with nothing to repeat")
            case _:
                return character(sign, in_json=self._in_json), 1

    def _group(self) -> tuple[str, int]:
        if self._take("?"):
            named = re.compile(r":|P?<[A-Za-z_]\w{0,63}>").match(self._pattern, self._at)
            if named is None:
                rest = self._pattern[self._at : self._at + 2]
                kinds = {"=": "look-around", "!": "look-around", "<=": "look-around"}
                kinds |= {"<!": "look-around", ">": "a group that keeps all", "#": "a comment"}
                kind = kinds.get(rest) or kinds.get(rest[:1]) or f"the group (?{rest}"
                raise self._error(kind)
            self._at = named.end()
        self._depth += 1
        if self._depth > MAX_GROUPS:
            raise self._error(f"more than {MAX_GROUPS} groups in one another")
        text, parts = self._alternatives()
        self._depth -= 1
        if not self._take(")"):
            raise self._error("an unclosed group")
        return text, parts

    def _escape(self) -> str:
        sign = self._next("an escape without its sign")
        if sign.lower() in SHORTHANDS:
            return self._set_of(True, *shorthand(sign, allows=True))
        if sign in "pP":
            return self._set_of(True, [], [self._property(sign)])
        sign = self._escaped(sign)
        if sign == NEVER:
            raise self._error("NUL")
        return character(sign, in_json=self._in_json)

    def _escaped(self, sign: str) -> str:
        """The character that an escape stands for, its sign read."""
        if sign in _CONTROLS:
            return _CONTROLS[sign]
        if sign in "xu":
            size = 2 if sign == "x" else 4
            found = re.compile(rf"([0-9A-Fa-f]{{{size}}})|\{{([0-9A-Fa-f]{{1,6}})\}}").match(
                self._pattern, self._at
            )
            if found is None:
                raise self._error(f"\\{sign} without its digits")
            self._at = found.end()
            return self._of_code(int(found[1] or found[2], 16))
        if sign.isalnum():
            what = "word boundaries" if sign in "bB" else f"\\{sign}"
            raise self._error("backreferences" if sign in "0123456789k" else what)
        return sign

    def _of_code(self, code: int) -> str:
        if code > _MOST or 0xD800 <= code <= 0xDFFF:
            raise self._error(f"the character {code:x}, which no text has")
        return chr(code)

    def _property(self, sign: str) -> str:
        found = re.compile(r"\{[A-Za-z_]{1,32}(?:=[A-Za-z_]{1,32})?\}").match(
            self._pattern, self._at
        )
        if found is None:
            raise self._error(f"\\{sign} without a name in braces")
        self._at = found.end()
        return f"\\{sign}{found[0]}"

    def _set(self) -> str:
        allows = not self._take("^")
        ranges, classes = list[Range](), list[str]()
        while True:
            sign = self._next("an unclosed set")
            if sign == "]":
                if not ranges and not classes:
                    raise self._error("an empty set")
                return self._set_of(allows, ranges, classes)
            if sign == "[" or (sign in "&-~" and self._peek() == sign):
                raise self._error(f"{sign} in a set without a backslash")
            if sign == "\\":
                sign = self._next("an escape without its sign")
                if sign.lower() in SHORTHANDS or sign in "pP":
                    more = (
                        ([], [self._property(sign)])
                        if sign in "pP"
                        else shorthand(sign, allows=allows)
                    )
                    ranges += more[0]
                    classes += more[1]
                    continue
                sign = "\b" if sign == "b" else self._escaped(sign)
            low = high = ord(sign)
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("", "]"):
                self._at += 1
                end = self._next()
                if end == "\\":
                    end = self._escaped(self._next("an escape without its sign"))
                elif end == "[":
                    raise self._error("[ in a set without a backslash")
                high = ord(end)
            if high < low:
                raise self._error("a range of a set whose ends are the wrong way round")
            ranges.append((low, high))

    def _set_of(self, allows: bool, ranges: list[Range], classes: list[str]) -> str:
        return set_of(ranges, classes, allows=allows, in_json=self._in_json)

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self, sign: str) -> bool:
        taken = self._peek() == sign
        self._at += taken
        return taken

    def _next(self, missing: str = "more of it") -> str:
        sign = self._peek()
        if not sign:
            raise self._error(missing)
        self._at += 1
        return sign

    def _error(self, what: str) -> GrammarError:
        return GrammarError(f"an expression without {what} (at {self._at})")


def _bounded(parts: int) -> None:
    if parts > MAX_PARTS:
        raise _too_large()


def _too_large() -> GrammarError:
    return GrammarError(
        f"an expression of at most {MAX_PARTS:,} parts, its repetitions written out"
    )
