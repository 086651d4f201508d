"""Values that a model writes as plain text, as JSON of the type that a tool's schema asks for."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping

_INTEGER = re.compile(r"[-+]?\d{1,400}", re.ASCII)
_NUMBER = re.compile(r"[-+]?(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:[eE][-+]?\d{1,3})?", re.ASCII)
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_MAX_UNION = 64
_MAX_LITERAL = 100_000


def types_of(schema: object) -> frozenset[str]:
    """JSON types that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    for name in ("anyOf", "oneOf"):
        several = schema.get(name)
        if isinstance(several, list):
            kinds = [s.get("type") for s in several[:_MAX_UNION] if isinstance(s, Mapping)]
            return frozenset(each for each in kinds if isinstance(each, str))
    values = schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(each, str) for each in values):
        return frozenset({"string"})
    return frozenset()


def as_json(text: str, types: frozenset[str]) -> str:
    """``text`` in JSON: as one of ``types`` if it can be read so, else as a string."""
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
    if not types or types & {"object", "array"}:
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
    """A value in JSON, or as Python writes it, as templates do that print an object as it is."""
    try:
        found = json.dumps(_value(text), ensure_ascii=False, allow_nan=False)
        found.encode()
        return found
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _value(text: str) -> object:
    """Raises what ``json.loads`` and ``ast.literal_eval`` raise."""
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
    """Whether JSON means the same: no tuples, sets or bytes, and no names but texts."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float)


def _refuse(word: str) -> None:
    raise ValueError(word)
