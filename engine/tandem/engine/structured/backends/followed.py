"""Checks that a library ignores no part of a form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tandem.engine.structured.errors import GrammarError
from tandem.engine.structured.rewrite import subschemas
from tandem.protocol.structured import StructuredOutputsParams, restricts

LEAF_SHAPES = (
    "type minLength maxLength",
    "type pattern",
    "type enum",
    "const",
    "anyOf",
    "$ref",
)
"""Keywords that every library supports together, of schemas without items or properties."""
_WHOLE = ("enum", "const", "anyOf", "$ref")
"""Keywords that need no type."""
_IMPLIED = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
}
"""Keywords that imply a type if a schema has none."""
_INNER = ("properties", "additionalProperties", "items", "prefixItems", "anyOf")
"""Keywords whose values must be objects of schemas."""
_COUNTS = tuple(f"{most}{what}" for most in ("min", "max") for what in ("Items", "Length"))
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
_PART = re.compile(
    r"\[(?P<not>\^?)(?P<set>(?:\\.|[^\\\]])*)\]|(?P<escape>\\.)|(?P<sign>.)", re.DOTALL
)
_SET = re.compile(r"(?:a-z|A-Z|0-9|[a-z]-[a-z]|[0-9]-[0-9]|\\[^\\\w]|[^\\\"\[&~^\x00-\x1f-]|-$)+")
_CLASSES = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}
_NEVER = r'"\\\x00-\x1f'
"""Characters that JSON escapes in a string, within a set."""


def is_simple(value: Any) -> bool:
    """Return whether a value is a text, an integer, a truth value or null."""
    return value is None or isinstance(value, str | int)


def check_kind(wanted: StructuredOutputsParams, name: str, kinds: Sequence[str]) -> None:
    """Raise GrammarError if a backend does not support this kind of form."""
    if wanted.kind not in kinds:
        allowed = f"one of {', '.join(kinds)} with the backend {name}"
        raise GrammarError(f"{allowed}; {wanted.kind} requires another backend")
    if wanted.reasoning is not None:
        raise GrammarError(f"without reasoning before the answer, which {name} does not support")


def schema_of(
    wanted: StructuredOutputsParams,
    name: str,
    shapes: Sequence[str],
    *,
    has_value: Callable[[Any], bool] = is_simple,
    has_any: bool = True,
) -> str:
    """Return a schema for a backend, whose answers are valid under the given one. Raises
    GrammarError if the backend would ignore a part. ``shapes``: keywords that it supports together.
    ``has_value``: supports an enum's value; ``has_any``: supports objects and arrays of any
    content."""
    schema = {"type": "object"} if wanted.json is None else json.loads(wanted.json)
    if not isinstance(schema, dict):
        raise GrammarError(f"a schema that is an object, for {name}")
    sets = [set(shape.split()) for shape in shapes]
    for place, each in subschemas(schema):
        used = {key for key, value in each.items() if restricts(key, value)}
        if place == "/":
            used.discard("$id")
        for key in each.keys() - used - {"$defs", "definitions"}:
            del each[key]  # libraries have keywords and formats of their own
        wrong = _wrong(each, used, schema, has_value)
        if wrong is None and not has_any and _has_any(each):
            wrong = "properties or items of any kind"
        if wrong is None and not any(used <= shape for shape in sets):
            unknown = used.difference(*sets)
            wrong = min(unknown) if unknown else " and ".join(sorted(used - {"type"}))
        if wrong is not None:
            raise GrammarError(f"a schema without {wrong} at {place}: {name} does not support it")
    return json.dumps(schema)


def _wrong(
    schema: dict[str, Any], used: set[str], root: dict[str, Any], has_value: Callable[[Any], bool]
) -> str | None:
    if not used.intersection(("type", *_WHOLE)):
        implied = next((kind for kind, keywords in _IMPLIED.items() if keywords & used), None)
        if implied is None:
            return "values of any type"
        schema["type"] = implied
    kind, properties = schema.get("type"), schema.get("properties", {})
    if properties:
        used.discard("additionalProperties")
        schema.pop("additionalProperties", None)  # no other property is written
    if "$ref" in used and not _is_local(schema["$ref"], root):
        return "$ref"
    if wrong := next((name for name in used if not _is_read(name, schema[name])), None):
        return wrong
    if isinstance(kind, list) and used != {"type"}:
        return "several types"
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if not all(has_value(each) and (kind is None or _is_of(each, kind)) for each in values):
        return "const" if "const" in schema else "enum"
    if "pattern" in used:
        schema["pattern"] = json_pattern(schema["pattern"])
        return None if schema["pattern"] else "pattern"
    if not all(map(is_plain, properties)):
        return "properties"
    return None if set(schema.get("required", ())) <= properties.keys() else "required"


def _is_read(name: str, value: Any) -> bool:
    if name in _COUNTS:
        return type(value) is int
    if name == "properties":
        value = [*value.values()]
    inner = value if isinstance(value, list) else [value]
    return name not in _INNER or all(isinstance(each, dict) for each in inner)


def _is_local(reference: Any, root: dict[str, Any]) -> bool:
    found = _REFERENCE.fullmatch(str(reference))
    return found is not None and found[2] in root.get(found[1], {})


def _has_any(schema: dict[str, Any]) -> bool:
    kind = schema.get("type")
    named = schema.get("properties") or isinstance(schema.get("additionalProperties"), dict)
    listed = "items" in schema or "prefixItems" in schema
    return ("object" in kind and not named) or ("array" in kind and not listed) if kind else False


def _is_of(value: Any, kind: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return bool(kind == ("null" if value is None else "boolean"))
    return kind == "string" if isinstance(value, str) else kind in ("integer", "number")


def is_plain(text: Any) -> bool:
    """Return whether JSON writes ``text`` without escapes."""
    return json.dumps(text, ensure_ascii=False) == f'"{text}"'


def unanchored(regex: str) -> str:
    """Return an expression without anchors at its ends, which whole texts do not need."""
    return re.sub(r"^\^|(?<!\\)\$$", "", regex)


def json_pattern(pattern: str) -> str | None:
    """Return an expression of strings that match ``pattern`` without escapes in JSON, or None.
    Libraries put it between quotes unchanged."""
    try:
        return _PART.sub(_in_json, unanchored(pattern))
    except ValueError:
        return None


def _in_json(part: re.Match[str]) -> str:
    if (inner := part["set"]) is not None:
        if part["not"] and "[" not in inner:
            return f"[^{inner}{_NEVER}]"
        for name, signs in _CLASSES.items():
            inner = inner.replace(name, signs)
        if part["not"] or not _SET.fullmatch(inner):
            raise ValueError(inner)
        return f"[{inner}]"
    if (escape := part["escape"]) is not None:
        if escape in _CLASSES:
            return f"[{_CLASSES[escape]}]"
        if escape[1].isalnum() or escape[1] in _NEVER:
            raise ValueError(escape)
        return escape
    if part["sign"] == ".":
        return f"[^{_NEVER}]"
    if not is_plain(part["sign"]):
        raise ValueError(part["sign"])
    return part["sign"]
