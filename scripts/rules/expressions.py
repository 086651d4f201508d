"""Which series and labels a PromQL expression names; read by its words, without a parser of it.

promtool says whether an expression is right (``make rules``); this says what it is about, where
there is no Go. Used by the tests and by the page of all metrics.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<range>\[[^\]]*\])
    | (?P<number>\d[\d.]*(?:e[+-]?\d+|[a-z]+)?)
    | (?P<variable>\$\w+|\$\{\w+\})
    | (?P<name>[a-zA-Z_:][\w:]*)
    | (?P<sign>=~|!~|!=|[(){},=<>+\-*/%^])
    """,
    re.VERBOSE,
)
_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan", "Inf", "NaN"}
_SUFFIXES = ("_bucket", "_sum", "_count", "_total")


class Selector(NamedTuple):
    """A series as an expression names it."""

    name: str
    labels: tuple[str, ...]


class Named(NamedTuple):
    """Names that an expression uses."""

    selectors: list[Selector]
    grouped: set[str]
    """Labels by which it sums or joins."""


def read(expression: str) -> Named:
    """Series with the labels that select them, and labels of groupings."""
    tokens = [(each.lastgroup or "", each.group()) for each in _TOKEN.finditer(expression)]
    selectors: list[Selector] = []
    grouped: set[str] = set()
    place = 0
    while place < len(tokens):
        kind, text = tokens[place]
        after = tokens[place + 1][1] if place + 1 < len(tokens) else ""
        place += 1
        if kind != "name" or text in _WORDS:
            continue
        if text in _LISTS:
            if after == "(":
                inside, place = _until(tokens, place + 1, ")")
                grouped |= set(_names(inside))
        elif after == "{":
            inside, place = _until(tokens, place + 1, "}")
            selectors.append(Selector(text, tuple(_names(inside))))
        elif after != "(" and not _called(tokens, place):
            selectors.append(Selector(text, ()))
    return Named(selectors, grouped)


def family(name: str) -> tuple[str, ...]:
    """Names under which a registry may know a scraped series: itself, and without its ending."""
    ends = [name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)]
    return (name, *ends)


def _called(tokens: list[tuple[str, str]], place: int) -> bool:
    """An aggregation like ``sum by (x) (…)`` has its parenthesis after the grouping."""
    return place < len(tokens) and tokens[place][1] in ("by", "without")


def _until(
    tokens: list[tuple[str, str]], place: int, end: str
) -> tuple[list[tuple[str, str]], int]:
    inside = []
    while place < len(tokens) and tokens[place][1] != end:
        inside.append(tokens[place])
        place += 1
    return inside, place + 1


def _names(tokens: list[tuple[str, str]]) -> Iterator[str]:
    return (text for kind, text in tokens if kind == "name")
