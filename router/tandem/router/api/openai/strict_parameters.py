"""Arguments that a model writes as parameters between tags, for structural tags.

Strings are plain text and other values JSON, so some constraints of strings are not enforced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tandem.protocol.structured import restricts
from tandem.text.parsers.tables import ParameterText
from tandem.text.parsers.values import types_of

Form = dict[str, Any]

_ROOT = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
)
_STRING = frozenset({"type", "enum", "const", "minLength", "maxLength"})
_DEFINED = re.compile(r"#/(\$defs|definitions)/[^/]+")
_NULLS = ("null", "none")
"""Texts that are read as null if it is allowed."""
_NOTHING: Form = {"type": "const_string", "value": ""}


class NotFollowed(ValueError):
    """A schema that this syntax cannot enforce; names the place and what is allowed."""

    def __init__(self, at: str, allowed: str) -> None:
        super().__init__(f"{at}: {allowed}")
        self.at, self.allowed = at, allowed


class TooLong(ValueError):
    """The form exceeds its bytes."""


def parameters_form(schema: object, text: ParameterText, room: int | None = None) -> Form:
    """Return the form of an object's parameters, in the schema's order.

    Raises NotFollowed, and TooLong if they take more than ``room`` bytes of JSON.
    """
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise NotFollowed("/type", "object")
    _only(schema, _ROOT, "")
    properties = schema.get("properties") or {}
    if not isinstance(properties, Mapping):
        raise NotFollowed("/properties", "an object")
    required = _listed(schema, "required", "") or []
    unknown = [each for each in required if not isinstance(each, str) or each not in properties]
    if unknown:
        raise NotFollowed("/required", f"names in properties, not {unknown[0]!r}")
    needed = frozenset(required)
    defined = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    made: list[Form | msgspec.Raw] = []
    for key, each in properties.items():
        form = _parameter(key, each, text, defined, needed=key in needed)
        if room is None:
            made.append(form)
            continue
        written = msgspec.json.encode(form)
        room -= len(written)
        if room < 0:
            raise TooLong
        made.append(msgspec.Raw(written))
    return {"type": "sequence", "elements": made or [_NOTHING]}


def _parameter(
    key: str, schema: object, text: ParameterText, defined: Form, *, needed: bool
) -> Form:
    at = f"/properties/{key}"
    if not key.strip() or key != key.strip() or text.key_end in key or "\n" in key:
        raise NotFollowed(at, "a name without line ends and marks of the format")
    content, is_free = _value(schema, text, defined, at)
    tag = {
        "type": "tag",
        "begin": text.begin.replace("{key}", key),
        "content": content,
        # A free text ends at the first mark.
        "end": text.end if is_free else text.pad + text.end,
    }
    behind = [{"type": "const_string", "value": text.after}] if text.after else []
    written: Form = {"type": "sequence", "elements": [tag, *behind]}
    return written if needed else {"type": "or", "elements": [written, _NOTHING]}


def _value(schema: object, text: ParameterText, defined: Form, at: str) -> tuple[Form, bool]:
    """Return the form of a value, and whether it is free text."""
    for where in _references(schema, at):
        raise NotFollowed(where, "a $ref to a schema of $defs")
    types = types_of(schema, defined)
    if not isinstance(schema, Mapping) or "string" not in types:
        if isinstance(schema, Mapping) and defined and _refers(schema):
            schema = {**schema, **defined}
        return {"type": "json_schema", "json_schema": schema}, False
    if types - {"string", "null"}:
        raise NotFollowed(at, "string, or other types, not both")
    several = _listed(schema, "anyOf" if "anyOf" in schema else "oneOf", at)
    if several is not None and all(_is_plain(each) for each in several):
        _only(schema, frozenset({"anyOf", "oneOf"}), at)
        return {"type": "any_text"}, True
    values = _constants_of_all(several, at) if several else None
    if values is not None:
        _only(schema, frozenset({"anyOf", "oneOf"}), at)
    else:
        _only(schema, _STRING, at)
        values = _constants_of(schema, at)
    if values is not None:
        elements = [_constant(each, text, at, nullable="null" in types) for each in values]
        return {"type": "or", "elements": elements}, False
    least, most = _length(schema, "minLength", at), _length(schema, "maxLength", at)
    if least or most is not None:
        if "null" in types:
            raise NotFollowed(at, "minLength and maxLength of a string that is never null")
        ending = "" if most is None else most
        return {"type": "regex", "pattern": f"[^<\\n]{{{least or 0},{ending}}}"}, False
    return {"type": "any_text"}, True


def _constants_of(schema: Mapping[str, Any], at: str) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else _listed(schema, "enum", at)


def _constants_of_all(several: Sequence[Any], at: str) -> list[Any] | None:
    """Return the values that schemas of which one must match allow together, null among them; None
    if one of them allows further values."""
    together: list[Any] = []
    for each in several:
        is_null = _is_plain(each) and each["type"] == "null"
        known = isinstance(each, Mapping) and _keywords_of(each) <= {"type", "enum", "const"}
        if not known:
            return None
        values = [None] if is_null else _constants_of(each, at)
        if values is None:
            return None
        together += values
    return together


def _listed(schema: Mapping[str, Any], keyword: str, at: str) -> list[Any] | None:
    listed = schema.get(keyword)
    if listed is not None and not isinstance(listed, list):
        raise NotFollowed(f"{at}/{keyword}", "a list")
    return listed


def _length(schema: Mapping[str, Any], keyword: str, at: str) -> int | None:
    length = schema.get(keyword)
    if length is None:
        return None
    counts = isinstance(length, float) and length.is_integer()
    counts = counts or (isinstance(length, int) and not isinstance(length, bool))
    if not counts or length < 0:
        raise NotFollowed(f"{at}/{keyword}", "an integer of at least 0")
    return int(length)


def _constant(value: object, text: ParameterText, at: str, *, nullable: bool) -> Form:
    if value is None and nullable:
        return {"type": "const_string", "value": "null"}
    if not isinstance(value, str):
        raise NotFollowed(at, "values of its type")
    read_as_null = nullable and value.strip().lower() in _NULLS
    if read_as_null or text.end in value or value != value.strip("\n"):
        raise NotFollowed(at, f"other values than {value!r}, which would be read as another")
    return {"type": "const_string", "value": value}


def _is_plain(schema: object) -> bool:
    """Return whether the schema states nothing but string or null, or both."""
    if not isinstance(schema, Mapping):
        return False
    kinds = schema.get("type")
    known = (each in ("string", "null") for each in (kinds if isinstance(kinds, list) else [kinds]))
    return all(known) and _keywords_of(schema) <= {"type"}


def _keywords_of(schema: Mapping[str, Any]) -> set[str]:
    return {keyword for keyword, value in schema.items() if restricts(keyword, value)}


def _only(schema: Mapping[str, Any], known: frozenset[str], at: str) -> None:
    for keyword, value in schema.items():
        if keyword not in known and restricts(keyword, value):
            allowed = ", ".join(sorted(known))
            raise NotFollowed(f"{at}/{keyword}", f"{allowed} in this model's format of calls")


def _refers(value: object) -> bool:
    if isinstance(value, Mapping):
        return "$ref" in value or any(map(_refers, value.values()))
    return isinstance(value, list) and any(map(_refers, value))


def _references(value: object, at: str) -> Iterator[str]:
    """Yield the places of references that do not resolve if the schema becomes a property."""
    if isinstance(value, Mapping):
        to = value.get("$ref")
        if isinstance(to, str) and not _DEFINED.fullmatch(to):
            yield f"{at}/$ref"
        for key, each in value.items():
            yield from _references(each, f"{at}/{key}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, each in enumerate(value):
            yield from _references(each, f"{at}/{index}")
