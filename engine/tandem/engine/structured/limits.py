"""Limits of a grammar that are checked before a backend reads it, since the backend has none.

A number that is a multiple of another is followed by an automaton with a state for each remainder.
The backend builds it without a bound of time, so the values of ``multipleOf`` are bounded here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

from tandem.engine.structured.errors import GrammarError
from tandem.protocol.structured import StructuredOutputsParams

MAX_REMAINDERS = 10_000
"""States of the automaton of all multiples in a schema together; about 0.5 s."""
_KEYWORD = "multipleOf"
_EMBEDDED = re.compile(r"%json\s*")


def check_multiples(wanted: StructuredOutputsParams) -> None:
    """Raise GrammarError if the multiples of a schema in ``wanted`` take too many states.

    Parts of a schema may be combined, so all its multiples count together.
    """
    for schema in _schemas_of(wanted):
        states = 1
        for value in _multiples(schema):
            states = math.lcm(states, _remainders(value))
            if states > MAX_REMAINDERS:
                raise GrammarError(
                    f"a schema that has values of {_KEYWORD} with a common multiple of at most "
                    f"{MAX_REMAINDERS:,}, factors of 2 and 5 left out"
                )


def _schemas_of(wanted: StructuredOutputsParams) -> Iterator[Any]:
    """Yield the schemas that a client has written, those within a grammar among them."""
    if wanted.json is not None:
        yield json.loads(wanted.json)
    if wanted.grammar is not None:
        yield from _embedded(wanted.grammar)
    if wanted.structural_tag is not None:
        tag = json.loads(wanted.structural_tag)
        yield tag
        for text in _texts(tag):
            yield from _embedded(text)


def _embedded(grammar: str) -> Iterator[Any]:
    """Yield the schemas in a grammar; one that is not JSON is refused by the backend."""
    decoder = json.JSONDecoder()
    for found in _EMBEDDED.finditer(grammar):
        try:
            yield decoder.raw_decode(grammar, found.end())[0]
        except (ValueError, RecursionError):
            continue


def _multiples(schema: Any) -> Iterator[float]:
    for each in _walked(schema):
        if isinstance(each, dict):
            value = each.get(_KEYWORD)
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield value


def _texts(value: Any) -> Iterator[str]:
    return (each for each in _walked(value) if isinstance(each, str))


def _walked(value: Any) -> Iterator[Any]:
    """Yield ``value`` and all that is in it."""
    left = [value]
    while left:
        each = left.pop()
        yield each
        if isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list):
            left += each


def _remainders(value: float) -> int:
    """Return how many remainders matter: factors of 2 and 5 are read off the last digits."""
    try:
        digits = Decimal(repr(value)).as_tuple().digits
    except InvalidOperation:
        return 1
    number = int("".join(map(str, digits)))
    for factor in (2, 5):
        while number and number % factor == 0:
            number //= factor
    return max(1, number)
