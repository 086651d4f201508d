"""Keywords of JSON Schema that may restrict values; all others are annotations.

Used by the code that makes grammars of schemas, in the engine and in the router.
"""

from __future__ import annotations

FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname"),
        *("ipv4", "ipv6", "iri", "iri-reference", "json-pointer", "regex"),
        *("relative-json-pointer", "time", "uri", "uri-reference", "uri-template", "uuid"),
    }
)
"""Formats of JSON Schema's own. Any other (password, int32, ...) is an annotation."""
KEYWORDS = frozenset(
    {
        *("type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$id", "$anchor"),
        *("properties", "required", "additionalProperties", "propertyNames", "minProperties"),
        *("maxProperties", "patternProperties", "dependentRequired", "dependentSchemas"),
        *("dependencies", "unevaluatedProperties", "items", "prefixItems", "additionalItems"),
        *("minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"),
        *("unevaluatedItems", "minLength", "maxLength", "pattern", "format", "minimum"),
        *("maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)
"""Keywords that may restrict values, of draft 2020-12 and before."""


def says(keyword: str, value: object) -> bool:
    """Return whether a keyword with a value may restrict values."""
    if keyword == "format":
        return not isinstance(value, str) or value in FORMATS
    return keyword in KEYWORDS
