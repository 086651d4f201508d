"""Rewrites a schema so that all answers that backends allow are valid under the given one.

Backends allow more than some formats' standards (2021-02-29 for a date), and do not know others.
Answers may be narrower than the schema, not wider. Subschemas stay in their places, which
references name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tandem.protocol.structured import FORMATS

NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose values are objects of schemas by name."""
VALUES = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords whose values are JSON, not schemas."""

_COUNTS = frozenset(
    f"{bound}{what}" for bound in ("min", "max") for what in ("Items", "Length", "Properties")
)
_NO_LEAP_SECOND = "[0-9]{2}:[0-9]{2}:[0-5]"
YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"(?:{YEAR}-(?:0[13-9]|1[0-2]|02-[01]|02-2[0-8])|{LEAP_YEAR}-02-29)"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"

_PATTERNS: dict[str, tuple[str, ...]] = {
    "date": (f"^{_DATE}",),
    "date-time": (f"^{_DATE}", f"^.{{11}}{_NO_LEAP_SECOND}"),
    "time": (f"^{_NO_LEAP_SECOND}",),
    # Labels in Punycode are as valid as their decoded text.
    "hostname": ("^(?:[^-]|-[^-])*$", "^.{0,253}$"),
}
"""Requirements of formats beyond backends' checks: existing dates, seconds under 60."""
_NARROWER = {
    "idn-email": "email",
    "idn-hostname": "hostname",
    "iri": "uri",
    "iri-reference": "uri",
    "uri-reference": "uri",
    "uri-template": "uri",
}
"""Narrower formats for those that backends do not know."""
_INSTEAD = {
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    "regex": "^[A-Za-z0-9 _]*$",
}
"""Expressions for formats that backends do not know."""


def followed(schema: Any) -> Any:
    """Return a JSON schema of bounded depth in keywords that backends support. Others are left for
    them to refuse."""
    has_dynamic_references = _mentions(schema, "$dynamicRef")

    def of(each: Any) -> Any:
        if isinstance(each, list):
            return [of(inner) for inner in each]
        if not isinstance(each, dict):
            return each
        made: dict[str, Any] = {}
        for key, value in each.items():
            if key in NAMED and isinstance(value, dict):
                made[key] = {name: of(inner) for name, inner in value.items()}
            else:
                made[key] = value if key in VALUES else of(value)
        if not has_dynamic_references:
            made.pop("$dynamicAnchor", None)
        _drop_what_says_nothing(made)
        _count_in_integers(made)
        _narrow_format(made)
        _names_as_patterns(made)
        return made

    return of(schema)


def _mentions(schema: Any, keyword: str) -> bool:
    if isinstance(schema, list):
        return any(_mentions(each, keyword) for each in schema)
    if not isinstance(schema, dict):
        return False
    return keyword in schema or any(_mentions(each, keyword) for each in schema.values())


def _drop_what_says_nothing(schema: dict[str, Any]) -> None:
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    if "then" not in schema and "else" not in schema:
        schema.pop("if", None)
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]


def _count_in_integers(schema: dict[str, Any]) -> None:
    for key in _COUNTS & schema.keys():
        value = schema[key]
        if isinstance(value, float) and value.is_integer():
            schema[key] = int(value)


def _narrow_format(schema: dict[str, Any]) -> None:
    name = schema.get("format")
    if not isinstance(name, str):
        return
    if name not in FORMATS:
        del schema["format"]
        return
    name = _NARROWER.get(name, name)
    patterns = _PATTERNS.get(name, ())
    if name in _INSTEAD:
        patterns = (_INSTEAD[name],)
        del schema["format"]
    else:
        schema["format"] = name
    everything = schema.get("allOf", [])
    if patterns and isinstance(everything, list):
        schema["allOf"] = [*everything, *({"pattern": pattern} for pattern in patterns)]


def _names_as_patterns(schema: dict[str, Any]) -> None:
    names = schema.get("propertyNames")
    if names is True or names == {} or names == {"type": "string"}:
        del schema["propertyNames"]
        return
    if not isinstance(names, dict) or {"properties", "patternProperties"} & schema.keys():
        return
    value = schema.get("additionalProperties", True)
    keywords = names.keys() - {"type", "title", "description"}
    if keywords == {"enum"} and all(isinstance(each, str) for each in names["enum"]):
        schema["properties"] = dict.fromkeys(names["enum"], value)
    elif keywords == {"const"} and isinstance(names["const"], str):
        schema["properties"] = {names["const"]: value}
    elif keywords == {"pattern"} and isinstance(names["pattern"], str):
        schema["patternProperties"] = {names["pattern"]: value}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False


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
