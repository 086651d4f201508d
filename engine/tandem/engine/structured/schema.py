"""Walk the subschemas of a JSON schema, with their places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tandem.engine.structured.rewrite import NAMED, VALUES


def subschemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object schema within ``schema`` with its JSON pointer, / for the whole."""
    places: list[tuple[str, Any]] = [("", schema)]
    while places:
        place, each = places.pop(0)
        if isinstance(each, list):
            places += [(f"{place}/{at}", inner) for at, inner in enumerate(each)]
        if not isinstance(each, dict):
            continue
        yield place or "/", each
        for name, inner in each.items():
            if name in NAMED and isinstance(inner, dict):
                places += [(f"{place}/{name}/{_escaped(key)}", s) for key, s in inner.items()]
            elif name not in VALUES:
                places.append((f"{place}/{_escaped(name)}", inner))


def place_of(keyword: str, schema: Any) -> str | None:
    """Return the place of the first schema within ``schema`` that has ``keyword``."""
    return next((place for place, each in subschemas(schema) if keyword in each), None)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
