"""Form that an answer must match (``structured_outputs``), in vLLM's names, and its bounds.

The worker that compiles the form decides whether it is valid.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tandem.protocol.errors import InvalidParameter

FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname"),
        *("ipv4", "ipv6", "iri", "iri-reference", "json-pointer", "regex"),
        *("relative-json-pointer", "time", "uri", "uri-reference", "uri-template", "uuid"),
    }
)
"""Formats of JSON Schema itself; others are annotations."""
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
"""Keywords that may restrict values, up to draft 2020-12."""


def restricts(keyword: str, value: object) -> bool:
    """Return whether a keyword with a value may restrict values."""
    if keyword == "format":
        return not isinstance(value, str) or value in FORMATS
    return keyword in KEYWORDS


MAX_CHOICES = 1_000
MAX_CHOICE_BYTES = 65_536
MAX_REGEX_BYTES = 16_384
MAX_SCHEMA_BYTES = 131_072
MAX_SCHEMA_DEPTH = 64
"""Maximum nesting of a schema."""
MAX_TAG_ELEMENTS = 1_024
"""Maximum formats of a structural tag."""
MAX_GRAMMAR_BYTES = 65_536
MAX_PATTERN_BYTES = 256
KINDS = ("choice", "regex", "json", "json_object", "grammar", "structural_tag")
BACKENDS = ("guidance", "outlines", "xgrammar", "lm-format-enforcer")
"""Libraries that follow grammars."""
JSON_KINDS = ("json", "json_object")


class ReasoningSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Texts around a model's reasoning, after which the form applies."""

    opens: tuple[str, ...] = ()
    """Texts that may open it; empty if the prompt has."""
    close: str
    """Text that closes it."""


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Form that the whole answer must match: exactly one of ``KINDS``."""

    choice: list[str] | None = None
    """One of these texts."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    json: str | None = None
    """A JSON schema, as text: the answer is one JSON value that is valid under it."""
    json_object: bool | None = None
    """True: any JSON object."""
    grammar: str | None = None
    """A context-free grammar in Lark's syntax, whose ``start`` the whole text matches."""
    structural_tag: str | None = None
    """Free text with structured parts: a structural tag of XGrammar, as JSON text."""
    backend: str | None = None
    """One of ``BACKENDS``; None for the worker's."""
    reasoning: ReasoningSpan | None = None
    """Reasoning that may precede the answer. Never set by a client."""
    disable_any_whitespace: bool = False
    """True forbids whitespace outside of JSON strings."""
    whitespace_pattern: str | None = None
    """Regular expression of the whitespace allowed between tokens of JSON."""

    @property
    def kind(self) -> str:
        """Return the field of ``KINDS`` that is set in verified parameters."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def verify(self) -> None:
        """Raise InvalidParameter, named as a field of ``structured_outputs``."""
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            allowed = f"exactly one of {', '.join(KINDS[:-1])} and {KINDS[-1]}"
            raise InvalidParameter("structured_outputs", given, allowed)
        if self.backend is not None and self.backend not in BACKENDS:
            raise _error("backend", self.backend, f"one of {', '.join(BACKENDS)}")
        if self.choice is not None:
            self._verify_choice(self.choice)
        _bounded("regex", self.regex, MAX_REGEX_BYTES)
        _bounded("grammar", self.grammar, MAX_GRAMMAR_BYTES)
        if self.json is not None:
            _bounded("json", self.json, MAX_SCHEMA_BYTES)
            _verify_json("json", self.json, "a JSON schema: an object, true or false")
        if self.structural_tag is not None:
            _bounded("structural_tag", self.structural_tag, MAX_SCHEMA_BYTES)
            _verify_json("structural_tag", self.structural_tag, "a structural tag: an object")
        if self.json_object is not None and self.json_object is not True:
            raise InvalidParameter("structured_outputs.json_object", self.json_object, "true")
        if self.whitespace_pattern is not None:
            _bounded("whitespace_pattern", self.whitespace_pattern, MAX_PATTERN_BYTES)
            if self.disable_any_whitespace:
                param, allowed = "whitespace_pattern", "none with disable_any_whitespace"
                raise _error(param, self.whitespace_pattern, allowed)
        if given[0] not in (*JSON_KINDS, "structural_tag"):
            for name in ("disable_any_whitespace", "whitespace_pattern"):
                if value := getattr(self, name):
                    raise _error(name, value, "only with json, json_object or structural_tag")

    def _verify_choice(self, choice: list[str]) -> None:
        texts = isinstance(choice, list | tuple) and "" not in choice
        if not (texts and 1 <= len(choice) <= MAX_CHOICES):
            allowed = f"1 to {MAX_CHOICES:,} texts of at least one character"
            raise _error("choice", choice, allowed)
        if sum(_utf8("choice", each) for each in choice) > MAX_CHOICE_BYTES:
            raise _error("choice", choice, f"at most {MAX_CHOICE_BYTES:,} bytes in all")


def _verify_json(name: str, text: str, allowed: str) -> None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _error(name, text, f"{allowed.partition(':')[0]}: {error}") from None
    if not isinstance(value, dict) and not (name == "json" and isinstance(value, bool)):
        raise _error(name, value, allowed)
    if _depth(value) > MAX_SCHEMA_DEPTH:
        raise _error(name, text, f"at most {MAX_SCHEMA_DEPTH} objects and lists in one another")


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        nests = any(isinstance(each, dict | list) for each in level)
        level, depth = inner, depth + nests
    return depth


def _bounded(name: str, text: str | None, most: int) -> None:
    if text is not None and not 1 <= _utf8(name, text) <= most:
        raise _error(name, text, f"1 to {most:,} bytes")


def _utf8(name: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise _error(name, text, "text without lone surrogates") from None


def _error(name: str, value: object, allowed: str) -> InvalidParameter:
    return InvalidParameter(f"structured_outputs.{name}", value, allowed)
