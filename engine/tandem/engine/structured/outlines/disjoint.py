"""Whether no value is valid under two of several schemas, as far as that is seen at a glance."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from tandem.engine.structured.outlines.values import kinds_of

MOST = 64
"""Schemas that are held against each other."""
MAX_COMPARED = 1_000_000
"""Values that are looked up among others, of one schema with all that is in it."""
_NUMBERS = {"integer", "number"}


class Disjoint:
    """Of one schema: what its parts list is read once, however many hold it against others."""

    def __init__(self, resolved: Callable[[Any], Any]) -> None:
        """``resolved``: a schema behind its references. Schemas must live as long as this."""
        self._resolved = resolved
        self._left = MAX_COMPARED
        self._parts: dict[int, _Part] = {}
        """By the identity of their schemas."""

    def are(self, schemas: Sequence[Any]) -> bool:
        """Whether each two are: by their types, by the values that they list, or by a property that
        both require and whose values, listed, are others. False where it is not seen."""
        if len(schemas) > MOST:
            return len(schemas) == 1
        return all(
            self._are_two(one, other)
            for one, other in combinations(map(self._resolved, schemas), 2)
        )

    def _are_two(self, one: Any, other: Any) -> bool:
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        part, also = self._part(one), self._part(other)
        if part.kinds and also.kinds and not part.kinds & also.kinds:
            return True
        if part.listed is not None and also.listed is not None:
            return self._are_others(part.listed, also.listed)
        if part.kinds != {"object"} or also.kinds != {"object"}:
            return False
        told, others = self._told(one), self._told(other)
        return any(self._are_others(told[name], others[name]) for name in told.keys() & others)

    def _are_others(self, values: frozenset[str], others: frozenset[str]) -> bool:
        """Whether two lists have no value in common; not, where too much was compared."""
        self._left -= 1 + min(len(values), len(others))
        return self._left >= 0 and values.isdisjoint(others)

    def _told(self, schema: dict[str, Any]) -> dict[str, frozenset[str]]:
        """Properties that are required and whose values are listed, with these."""
        part = self._part(schema)
        if part.told is None:
            part.told = {}
            properties, required = schema.get("properties"), schema.get("required")
            if isinstance(properties, dict) and isinstance(required, list):
                for name in required:
                    value = self._resolved(properties.get(name)) if isinstance(name, str) else None
                    listed = self._part(value).listed if isinstance(value, dict) else None
                    if listed is not None:
                        part.told[name] = listed
        return part.told

    def _part(self, schema: dict[str, Any]) -> _Part:
        part = self._parts.get(id(schema))
        if part is None:
            part = self._parts[id(schema)] = _Part(_kinds(schema), _listed(schema))
        return part


@dataclass(slots=True)
class _Part:
    """What is seen of one schema."""

    kinds: frozenset[str]
    """Types of its values."""
    listed: frozenset[str] | None
    told: dict[str, frozenset[str]] | None = None
    """See ``Disjoint._told``; None where nobody asked."""


def _listed(schema: dict[str, Any]) -> frozenset[str] | None:
    """Values that a schema lists, as text; None where it does not."""
    if "const" in schema:
        return frozenset((_text(schema["const"]),))
    values = schema.get("enum")
    return frozenset(map(_text, values)) if isinstance(values, list) else None


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _kinds(schema: dict[str, Any]) -> frozenset[str]:
    """Types of its values, an integer for a number; none where they are not said."""
    kinds: set[str] = set()
    if "const" in schema:
        kinds.update(kinds_of(schema["const"]))
    elif isinstance(schema.get("enum"), list):
        for each in schema["enum"]:
            kinds.update(kinds_of(each))
    else:
        types = schema.get("type")
        types = types if isinstance(types, list) else [types]
        kinds.update(each for each in types if isinstance(each, str))
    return frozenset("number" if each in _NUMBERS else each for each in kinds)
