"""Conversion of a msgspec type to a structural schema, the subset of OpenAPI v3 of CRDs.

``msgspec.json.schema`` does most of it; what remains is to inline its references, to drop what CRDs
do not allow (titles, nulls, defaults) and to hang the rules of ``rules`` where they belong.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.operator.api.rules import RULES

_DROPPED = ("title", "default", "$ref", "allOf")
_STRUCTS = {kind.__name__: kind for kind in RULES}


def structural(kind: type) -> dict[str, Any]:
    """Schema of ``kind`` with everything inlined; ``kind``'s docstring is its description."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    return _convert(schema, components)


def _convert(schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    schema = _resolved(schema, components)
    result = {key: value for key, value in schema.items() if key not in _DROPPED}
    if result.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result.pop("maxLength", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
        return result
    if result.get("x-kubernetes-preserve-unknown-fields"):
        result.pop("additionalProperties", None)
        return result
    if result.get("type") == "integer":
        result.setdefault("format", "int64" if result.get("maximum", 2**40) > 2**31 else "int32")
    if not result.get("required", True):
        del result["required"]  # the API server keeps no empty list: each apply would then conflict
    if "enum" in result:
        result.setdefault("type", "string")
    if "properties" in result:
        properties = result["properties"]
        result["properties"] = {
            name: _convert(each, components) for name, each in properties.items()
        }
    for key in ("items", "additionalProperties"):
        if isinstance(result.get(key), dict):
            result[key] = _convert(result[key], components)
    return result


def _resolved(schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """The schema with its reference and its one alternative to null merged in; its own keys win."""
    own = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf", "allOf")}
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _merged({**_resolved(components[name], components), **_rules(name)}, own)
    members = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    if len(members) == 1:
        return _merged(_resolved(members[0], components), own)
    return schema


def _merged(inner: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    return {**inner, **own}


def _rules(name: str) -> dict[str, Any]:
    kind = _STRUCTS.get(name)
    if kind is None:
        return {}
    return {"x-kubernetes-validations": [rule.manifest() for rule in RULES[kind]]}
