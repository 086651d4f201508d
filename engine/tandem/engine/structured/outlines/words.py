"""Keywords of JSON Schema: which type each is about, and which are followed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.engine.structured.grammar import GrammarError

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
MAX_COUNT = 20_000
"""Largest count of a keyword, such as minItems: larger ones take too many states."""
FOLLOWED = frozenset(
    {
        *("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
        *("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
        *("minLength", "maxLength", "pattern", "format"),
    }
)
"""Keywords about a type that are read."""
ABOUT: Mapping[str, str] = {
    **dict.fromkeys(("properties", "required", "additionalProperties", "propertyNames"), "object"),
    **dict.fromkeys(("minProperties", "maxProperties", "patternProperties"), "object"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), "object"),
    "unevaluatedProperties": "object",
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "uniqueItems"), "array"),
    **dict.fromkeys(("contains", "minContains", "maxContains", "unevaluatedItems"), "array"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum"), "number"),
    **dict.fromkeys(("exclusiveMaximum", "multipleOf"), "number"),
}
"""Keywords that say something of values of one type, and nothing of others."""


def refusal(keyword: str, at: str) -> GrammarError:
    """Of a keyword that is not followed where it stands."""
    return GrammarError(
        f"a schema without {keyword} at {at or '/'}, which outlines does not follow"
    )


def unmatched(at: str) -> GrammarError:
    """Of a schema that no value is valid under."""
    return GrammarError(f"a schema that some value matches at {at or '/'}")


def is_about(keyword: str, kind: str) -> bool:
    """Whether a keyword says something of values of a type."""
    return ABOUT.get(keyword) == ("number" if kind == "integer" else kind)


def implied(said: Mapping[str, Any]) -> str | None:
    """A type whose values a schema without one says something about; None where it says nothing.
    Answers are of it then: others are valid, too, and are left out."""
    return next((ABOUT[key] for key in said if key in ABOUT), None)


def count(said: Mapping[str, Any], keyword: str, at: str) -> int | None:
    """A keyword that counts; 2.0 is a count like 2."""
    value = said.get(keyword)
    if value is None and keyword not in said:
        return None
    whole = isinstance(value, int | float) and (isinstance(value, int) or value.is_integer())
    if isinstance(value, bool) or not isinstance(value, int | float) or not whole:
        raise GrammarError(f"a schema that has an integer for {keyword} at {at or '/'}")
    if value < 0:
        raise GrammarError(
            f"a schema that has an integer of at least 0 for {keyword} at {at or '/'}"
        )
    if value > MAX_COUNT:
        raise GrammarError(f"a schema whose {keyword} at {at or '/'} is at most {MAX_COUNT:,}")
    return int(value)
