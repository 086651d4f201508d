"""Values that a schema lists, so that outlines-core writes each as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tandem.engine.structured.grammar import GrammarError
from tandem.engine.structured.outlines.characters import quoted
from tandem.engine.structured.outlines.words import TYPES, refusal, unmatched

_MOST_INTEGER = 2**63
_MOST_DIGITS = 15
"""Of a number with a point: what is longer may be read as its neighbour."""


def value_of(said: Mapping[str, Any], at: str) -> Any:
    """A schema of ``enum`` or ``const``, and of a type at most beside it, in outlines-core's
    words."""
    key = "enum" if "enum" in said else "const"
    for other in said:
        if other not in (key, "type"):
            raise GrammarError(
                f"a schema without {other} beside {key} at {at or '/'}, which outlines does not "
                "follow together"
            )
    values = said[key] if key == "enum" else [said[key]]
    if not isinstance(values, list):
        raise GrammarError(f"a schema that has a list for enum at {at or '/'}")
    types = said.get("type", list(TYPES))
    kinds = types if isinstance(types, list) else [types]
    if any(kind not in TYPES for kind in kinds):
        raise GrammarError(f"a schema that has types of {', '.join(TYPES)} at {at or '/'}")
    allowed = frozenset(kinds)
    made = [
        _written(each, f"{at}/{key}") for each in values if not allowed.isdisjoint(kinds_of(each))
    ]
    if not made:
        raise unmatched(at)
    return {"enum": made}


def kinds_of(value: Any) -> tuple[str, ...]:
    """The types of a value."""
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("integer", "number") if value.is_integer() else ("number",)
        case str():
            return ("string",)
        case list():
            return ("array",)
        case _:
            return ("object",)


def _written(value: Any, at: str) -> Any:
    match value:
        case str():
            if any("\ud800" <= sign <= "\udfff" for sign in value):
                raise GrammarError(f"a schema that has no lone surrogates at {at}")
            return value
        case None | bool():
            return value
        case int() if abs(value) < _MOST_INTEGER:
            return value
        case float() if value.is_integer() and abs(value) < 2**53:
            return int(value)
        case float():
            digits = repr(value).lstrip("-")
            if len(digits) <= _MOST_DIGITS and digits.replace(".", "").isdigit():
                return value
            raise refusal(f"{at.rpartition('/')[2]} of {value!r}", at.rpartition("/")[0])
        case int():
            words = f"{at.rpartition('/')[2]} of so large an integer"
            raise refusal(words, at.rpartition("/")[0])
        case list():
            return [_written(each, at) for each in value]
        case _:
            # Names stand in the expression as they are given.
            return {
                quoted(json.dumps(_written(name, at), ensure_ascii=False)[1:-1]): _written(each, at)
                for name, each in value.items()
            }
