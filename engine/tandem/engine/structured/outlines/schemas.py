"""JSON schemas of which outlines-core makes an expression rightly, rewritten to the words that it
reads.

outlines-core reads the first keyword of a schema that it finds in a list and passes over the rest:
a minimum, a second property of an object in ``required`` alone, the other parts of ``allOf``. Here
each keyword is followed, says nothing about the answers that are left, or is refused with its
place. What comes out allows what the schema allows, or less, and never more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from tandem.engine.structured.grammar import GrammarError
from tandem.engine.structured.outlines.disjoint import Disjoint
from tandem.engine.structured.outlines.strings import string_of
from tandem.engine.structured.outlines.values import value_of
from tandem.engine.structured.outlines.words import (
    ABOUT,
    FOLLOWED,
    TYPES,
    count,
    implied,
    is_about,
    refusal,
    unmatched,
)
from tandem.engine.structured.schema import escaped
from tandem.protocol.schema_words import says

MAX_SCHEMAS = 4_000
"""Schemas in one another and beside another, references followed."""
MAX_NESTED = 64
"""Schemas in one another, references followed."""
_ANYTHING: dict[str, Any] = {
    "anyOf": [
        *({"type": each} for each in ("string", "number", "boolean", "null")),
        {"type": "object", "depth": 1},
        {"type": "array", "depth": 1},
    ]
}
"""Any value, three objects or lists in one another at most."""
_WHOLE = ("enum", "const", "$ref", "anyOf", "oneOf", "allOf")
"""Keywords of which one stands with none beside it but those that say nothing."""


def followed(schema: Any) -> Any:
    """``schema``, of bounded depth, in outlines-core's words. Raises GrammarError with the keyword
    and its place."""
    return _Reader(schema).of(schema, "")


@dataclass(frozen=True, slots=True)
class _Read:
    """What a reference names, read once however often it is referred to."""

    made: Any
    schemas: int
    """That are in it, itself included."""
    nested: int
    """Of those in one another."""


class _Reader:
    """Reads one schema from its root."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MAX_SCHEMAS
        self._references: list[str] = []
        self._nested = 0
        self._deepest = 0
        self._named: dict[str, Any] = {}
        """What references name, as it is given."""
        self._read: dict[str, _Read] = {}
        self._disjoint = Disjoint(self._resolved)
        self._makers: dict[str, Callable[[Mapping[str, Any], str], Any]] = {
            "object": self._object,
            "array": self._array,
            "string": string_of,
        }

    def of(self, schema: Any, at: str) -> Any:
        """One schema at its place."""
        self._count(1, 1)
        self._nested += 1
        self._deepest = max(self._deepest, self._nested)
        try:
            return self._of(schema, at)
        finally:
            self._nested -= 1

    def _count(self, schemas: int, nested: int) -> None:
        """Raise GrammarError where so many more are too many."""
        self._left -= schemas
        if self._left < 0 or self._nested + nested > MAX_NESTED:
            words = (
                f"a schema that is at most {MAX_SCHEMAS:,} schemas and {MAX_NESTED} in one another"
            )
            raise GrammarError(f"{words}, references written out")

    def _of(self, schema: Any, at: str) -> Any:
        if schema is False:
            raise unmatched(at)
        if schema is True:
            return _ANYTHING
        if not isinstance(schema, dict):
            raise GrammarError(f"a schema that is an object, true or false at {at or '/'}")
        said = {key: value for key, value in schema.items() if says(key, value)}
        if not at:
            said.pop("$id", None)
        for key in _WHOLE:
            if key in said:
                return self._whole(key, said, at)
        types = said.get("type", implied(said))
        if isinstance(types, list) and types:
            once = {json.dumps(each): each for each in types}.values()
            return {"anyOf": [self._typed({**said, "type": each}, at) for each in once]}
        return self._typed({**said, "type": types}, at)

    def _whole(self, key: str, said: Mapping[str, Any], at: str) -> Any:
        """A schema by one keyword that says all."""
        place = f"{at}/{key}"
        if key in ("enum", "const"):
            return value_of(said, at)
        for other in said:
            if other != key:
                raise GrammarError(
                    f"a schema without {other} beside {key} at {at or '/'}, which outlines does "
                    "not follow together"
                )
        value = said[key]
        if key == "$ref":
            return self._reference(value, place)
        if not isinstance(value, list) or not value:
            raise GrammarError(f"a schema that has a list of schemas at {place}")
        if key == "allOf" and len(value) > 1:
            raise refusal("allOf of several", at)
        if key == "oneOf" and not self._disjoint.are(value):
            raise GrammarError(
                f"a schema without oneOf at {at or '/'} whose parts a value may match together"
            )
        made = [self.of(each, f"{place}/{i}") for i, each in enumerate(value) if each is not False]
        if not made:
            raise unmatched(place)
        return {"anyOf": made} if len(made) > 1 else made[0]

    def _typed(self, said: Mapping[str, Any], at: str) -> Any:
        """A schema of one type, None for any."""
        kind = said["type"]
        if kind is not None and kind not in TYPES:
            raise GrammarError(
                f"a schema that has a type of {', '.join(TYPES)} at {at or '/'}, not {kind!r}"
            )
        for key in said:
            of_it = kind is not None and is_about(key, kind)
            if key != "type" and (key not in FOLLOWED if of_it else key not in ABOUT):
                raise refusal(key, at)
        if kind is None:
            return _ANYTHING
        make = self._makers.get(kind)
        return {"type": kind} if make is None else make(said, at)

    def _object(self, said: Mapping[str, Any], at: str) -> Any:
        properties = said.get("properties", {})
        required = said.get("required", [])
        if not isinstance(properties, dict):
            raise GrammarError(f"a schema that has an object for properties at {at or '/'}")
        if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
            raise GrammarError(f"a schema that has a list of names for required at {at or '/'}")
        others = said.get("additionalProperties", True)
        schemas = {
            name: (each, f"{at}/properties/{escaped(name)}") for name, each in properties.items()
        }
        for name in required:
            schemas.setdefault(name, (others, f"{at}/additionalProperties"))
        needed = frozenset(required)
        made = {
            name: self.of(*each)
            for name, each in schemas.items()
            if name in needed or each[0] is not False
        }
        least, most = count(said, "minProperties", at), count(said, "maxProperties", at)
        if least is not None and least > len(needed):
            raise refusal("minProperties", at)
        if not made and (others is False or properties or most == 0):
            return {"type": "object", "maxProperties": 0}
        if most is not None and (most < len(made) or not made):
            raise refusal("maxProperties", at)
        if made:
            names = {name: json.dumps(name, ensure_ascii=False)[1:-1] for name in made}
            return {
                "properties": {names[name]: each for name, each in made.items()},
                "required": [names[name] for name in made if name in needed],
            }
        if others is True:
            return {"type": "object", "additionalProperties": _ANYTHING}
        inner = self.of(others, f"{at}/additionalProperties")
        return {"type": "object", "additionalProperties": inner}

    def _array(self, said: Mapping[str, Any], at: str) -> Any:
        if said.get("uniqueItems", False) is not False:
            raise refusal("uniqueItems", at)
        least, most = count(said, "minItems", at) or 0, count(said, "maxItems", at)
        first, rest = said.get("prefixItems", []), said.get("items", True)
        if not isinstance(first, list) or isinstance(rest, list):
            raise GrammarError(
                f"a schema that has a list for prefixItems and a schema for items at {at or '/'}"
            )
        if most is not None and most < least:
            raise unmatched(at)
        if first and most != 0:
            first = first[:most]
            if least > len(first):
                raise refusal("minItems beyond prefixItems", at)
            inner = [self.of(each, f"{at}/prefixItems/{i}") for i, each in enumerate(first)]
            return {"prefixItems": inner}
        if most == 0 or (rest is False and not least):
            return {"type": "array", "maxItems": 0}
        made: dict[str, Any] = {"type": "array", "items": self.of(rest, f"{at}/items")}
        return made | {"minItems": least} | ({} if most is None else {"maxItems": most})

    def _reference(self, reference: Any, at: str) -> Any:
        if reference in self._references:
            raise refusal("$ref to what it is in", at.rpartition("/")[0])
        found = self._found(reference, at)
        read = self._read.get(reference)
        if read is not None:
            self._count(read.schemas, read.nested)
            self._deepest = max(self._deepest, self._nested + read.nested)
            return read.made
        left, deepest, self._deepest = self._left, self._deepest, self._nested
        self._references.append(reference)
        try:
            made = self.of(found, reference[1:])
        finally:
            self._references.pop()
        self._read[reference] = _Read(made, left - self._left, self._deepest - self._nested)
        self._deepest = max(self._deepest, deepest)
        return made

    def _found(self, reference: Any, at: str) -> Any:
        """The schema that a reference names."""
        if not isinstance(reference, str) or not (reference == "#" or reference[:2] == "#/"):
            words = (
                f"a schema that refers to its own parts (#/...) at {at}, not to {reference!r:.200}"
            )
            raise GrammarError(words)
        if reference in self._named:
            return self._named[reference]
        found = self._root
        for part in unquote(reference).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                words = f"a schema that refers to what is there at {at}, not to {reference!r:.200}"
                raise GrammarError(words)
            if isinstance(found, dict) and "$id" in found:
                raise refusal("$id", unquote(reference)[1:])
        self._named[reference] = found
        return found

    def _resolved(self, schema: Any) -> Any:
        """A schema behind its references, as far as they lead."""
        for _ in range(MAX_NESTED):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._found(schema["$ref"], "$ref")
        return schema
