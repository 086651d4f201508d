"""Where a keyword stands in a JSON schema, so that an error can say it."""

from __future__ import annotations

from typing import Any

from tandem.engine.structured.rewrite import NAMED, VALUES


def place_of(keyword: str, schema: Any) -> str | None:
    """JSON pointer of the first schema within ``schema`` that has ``keyword``, / for the whole, or
    None where none has."""
    places: list[tuple[str, Any]] = [("", schema)]
    while places:
        place, each = places.pop(0)
        if isinstance(each, list):
            places += [(f"{place}/{at}", inner) for at, inner in enumerate(each)]
            continue
        if not isinstance(each, dict):
            continue
        if keyword in each:
            return place or "/"
        for name, inner in each.items():
            if name in NAMED and isinstance(inner, dict):
                places += [(f"{place}/{name}/{escaped(key)}", s) for key, s in inner.items()]
            elif name not in VALUES:
                places.append((f"{place}/{escaped(name)}", inner))
    return None


def escaped(key: str) -> str:
    """A name as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
