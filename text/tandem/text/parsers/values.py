"""Values that a model writes as plain text, converted to JSON of the type in a tool's schema."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

_INTEGER = re.compile(r"[-+]?\d{1,400}", re.ASCII)
_NUMBER = re.compile(r"[-+]?(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:[eE][-+]?\d{1,3})?", re.ASCII)
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_MAX_LOOKS = 256
"""Maximum schemas that are read for the types of one."""
_MAX_LITERAL = 100_000
_DEFINED = re.compile(r"#/(\$defs|definitions)/([^/]+)")
DEFINED_STRING = "defined string"
"""Result of ``types_of`` for a string that is defined elsewhere. Some models and grammars write it
as JSON, with its quotes; others without."""


def types_of(schema: object, root: object = None) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty if it does not name them all.

    ``root`` is the schema in whose ``$defs`` or ``definitions`` its references are looked up. A
    string that one refers to is ``DEFINED_STRING``, even if a plain string is also allowed.
    """
    types: set[str] = set()
    waiting: list[tuple[object, bool]] = [(schema, False)]
    followed: set[str] = set()
    for _ in range(_MAX_LOOKS):
        if not waiting:
            return frozenset(types - {"string"} if DEFINED_STRING in types else types)
        each, is_defined = waiting.pop()
        if not isinstance(each, Mapping):
            break
        own, several, to = _own_types(each), _several(each), each.get("$ref")
        if own:
            types |= own
            if is_defined and "string" in own:
                types.add(DEFINED_STRING)
        elif several is not None:
            waiting += [(one, is_defined) for one in several[:_MAX_LOOKS]]
        elif not isinstance(to, str):
            break
        elif to not in followed:
            followed.add(to)
            waiting.append((_definition(to, root), True))
    return frozenset()


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema names itself."""
    kind = schema.get("type")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    if "anyOf" in schema or "oneOf" in schema or not isinstance(values, list):
        return frozenset()
    is_text = bool(values) and all(isinstance(each, str) for each in values)
    return frozenset({"string"}) if is_text else frozenset()


def _several(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the schemas of ``anyOf`` or ``oneOf``, or None."""
    lists = (schema.get(name) for name in ("anyOf", "oneOf"))
    return next((each for each in lists if isinstance(each, list)), None)


def _definition(to: str, root: object) -> object:
    """Return the target of a reference; None if it has none."""
    place = _DEFINED.fullmatch(to)
    room = root.get(place[1]) if place is not None and isinstance(root, Mapping) else None
    return room.get(place[2]) if place is not None and isinstance(room, Mapping) else None


def as_json(text: str, types: frozenset[str]) -> str:
    """Return ``text`` as JSON: as one of ``types`` if it can be read so, else as a string.

    A string that is defined elsewhere is read as JSON if it begins with a quote.
    """
    bare = text.strip()
    word = _WORDS.get(bare.lower())
    if word == "null" and ("null" in types or not types):
        return "null"
    if word in ("true", "false") and ("boolean" in types or not types):
        return word
    if "integer" in types and _INTEGER.fullmatch(bare):
        return str(int(bare))
    if "number" in types and _NUMBER.fullmatch(bare):
        return _number(bare)
    begins = ("[", "{") if types & {"object", "array"} else ()
    any_json = not types or (begins and not types & {"string", DEFINED_STRING})
    if DEFINED_STRING in types:
        begins = (*begins, '"')
    if any_json or bare.startswith(begins):
        found = _parsed(bare)
        if found is not None:
            return found
    return json.dumps(text, ensure_ascii=False)


def _number(text: str) -> str:
    if _INTEGER.fullmatch(text):
        return str(int(text))
    value = float(text)
    return json.dumps(value) if abs(value) != float("inf") else json.dumps(text)


def _parsed(text: str) -> str | None:
    """Return a value that is written as JSON or as a Python literal; None if it is neither.
    Templates that print an object write Python literals."""
    try:
        found = json.dumps(_value(text), ensure_ascii=False, allow_nan=False)
        found.encode()
        return found
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _value(text: str) -> object:
    """Return the parsed value. Raises what ``json.loads`` and ``ast.literal_eval`` raise."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except ValueError:
        if not text.startswith(("[", "{")) or len(text) > _MAX_LITERAL:
            raise
    value = ast.literal_eval(text)
    if not _is_json(value):
        raise ValueError(text)
    return value


def _is_json(value: object) -> bool:
    """Return whether a value is the same in JSON: no tuples, sets or bytes, only text keys."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float)


def _refuse(word: str) -> None:
    raise ValueError(word)
