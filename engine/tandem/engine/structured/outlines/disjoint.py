"""Whether no value is valid under two of several schemas, as far as that is seen at a glance."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from tandem.engine.structured.outlines.values import kinds_of

MOST = 64
"""Schemas that are held against each other."""
_NUMBERS = {"integer", "number"}


def are_disjoint(schemas: Sequence[Any], resolved: Callable[[Any], Any]) -> bool:
    """Whether each two are: by their types, by the values that they list, or by a property that
    both require and whose values, listed, are others. ``resolved``: a schema behind its
    references. False where it is not seen."""
    if len(schemas) > MOST:
        return len(schemas) == 1
    return all(
        _are_two(one, other, resolved) for one, other in combinations(map(resolved, schemas), 2)
    )


def _are_two(one: Any, other: Any, resolved: Callable[[Any], Any]) -> bool:
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    kinds, others = _kinds(one), _kinds(other)
    if kinds and others and not kinds & others:
        return True
    listed, also = _listed(one), _listed(other)
    if listed is not None and also is not None:
        return not listed & also
    if kinds != {"object"} or others != {"object"}:
        return False
    return any(
        not _values(one, name, resolved) & _values(other, name, resolved)
        for name in _told(one, resolved) & _told(other, resolved)
    )


def _told(schema: dict[str, Any], resolved: Callable[[Any], Any]) -> set[str]:
    """Names of properties that are required and whose values are listed."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return set()
    return {
        name
        for name in required
        if isinstance(name, str) and _listed(resolved(properties.get(name))) is not None
    }


def _values(schema: dict[str, Any], name: str, resolved: Callable[[Any], Any]) -> set[str]:
    return _listed(resolved(schema["properties"][name])) or set()


def _listed(schema: Any) -> set[str] | None:
    """Values that a schema lists, as text; None where it does not."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return {_text(schema["const"])}
    values = schema.get("enum")
    return {_text(each) for each in values} if isinstance(values, list) else None


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _kinds(schema: dict[str, Any]) -> set[str]:
    """Types of its values, an integer for a number; none where they are not said."""
    kinds: set[str] = set()
    if "const" in schema:
        kinds.update(kinds_of(schema["const"]))
    elif isinstance(schema.get("enum"), list):
        for each in schema["enum"]:
            kinds.update(kinds_of(each))
    else:
        types = schema.get("type")
        kinds.update(each for each in (types if isinstance(types, list) else [types]) if each)
    return {"number" if each in _NUMBERS else each for each in kinds}
