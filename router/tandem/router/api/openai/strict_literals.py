"""Arguments that a model writes as literals of Python or Gemma, for structural tags.

The form may allow less than the schema: properties have the schema's order, and no others are
allowed.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.protocol.structured import MAX_TAG_ELEMENTS, restricts
from tandem.router.api.openai.strict_parameters import NotFollowed
from tandem.text.parsers.tables import LiteralText

Form = dict[str, Any]

NOTHING: Form = {"type": "const_string", "value": ""}
_OF_TYPES: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""Types, and supported keywords of each."""
_MOST_ITEMS = 16
"""Maximum of maxItems and minItems."""
_MOST_DEEP = 32
_BARE = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_ESCAPED = r'\\["\\nrtbf]'
"""Escapes that JSON and Python share."""


def literals_form(schema: object, text: LiteralText) -> Form:
    """Return the form of an object's arguments. Raises NotFollowed."""
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise NotFollowed("/type", "object")
    return _Writer(schema, text).arguments()


class _Writer:
    """Writes one schema."""

    def __init__(self, root: Mapping[str, Any], text: LiteralText) -> None:
        self._root = root
        self._text = text
        self._left = MAX_TAG_ELEMENTS
        self._deep = 0

    def arguments(self) -> Form:
        root = {key: value for key, value in self._root.items() if key not in _DEFINITIONS}
        _only(root, frozenset({"type", *_OF_TYPES["object"]}), "")
        return self._fields(root, self._text.key, "")

    def _value(self, schema: object, at: str) -> Form:
        self._count(at)
        if not isinstance(schema, Mapping):
            raise NotFollowed(at, "a schema that is an object")
        self._deep += 1
        if self._deep > _MOST_DEEP:
            raise NotFollowed(at, f"at most {_MOST_DEEP} nested schemas")
        try:
            return self._one(schema, at)
        finally:
            self._deep -= 1

    def _one(self, schema: Mapping[str, Any], at: str) -> Form:
        reference = schema.get("$ref")
        if reference is not None:
            _only(schema, frozenset({"$ref"}), at)
            return self._value(self._defined(reference, at), at)
        for several in ("anyOf", "oneOf"):
            if several in schema:
                _only(schema, frozenset({several}), at)
                return self._any_of(schema[several], f"{at}/{several}", several)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            _only(schema, frozenset({"type", "const", "enum"}), at)
            return self._constants(values, schema.get("type"), at)
        types = schema.get("type")
        if isinstance(types, list) and types:
            return _or([self._typed(str(each), schema, at) for each in types])
        return self._typed(str(types), schema, at)

    def _typed(self, kind: str, schema: Mapping[str, Any], at: str) -> Form:
        self._count(at)
        known = _OF_TYPES.get(kind)
        if known is None:
            raise NotFollowed(f"{at}/type", ", ".join(_OF_TYPES))
        listed = schema.get("type")
        others = listed if isinstance(listed, list) else [kind]
        of_others = [_OF_TYPES.get(str(each), frozenset()) for each in others]
        _only(schema, frozenset({"type"}).union(*of_others), at)
        true, false, null = self._text.words
        match kind:
            case "boolean":
                return _or([_const(true), _const(false)])
            case "null":
                return _const(null)
            case "string":
                return self._string(schema, at)
            case "array":
                return self._array(schema, at)
            case "object":
                if not schema.get("properties") and schema.get("additionalProperties") is not False:
                    raise NotFollowed(at, "an object with named properties")
                inner = self._fields(schema, self._text.inner_key, at)
                return _sequence([_const("{"), inner, _const("}")])
        bounds = {key: value for key, value in schema.items() if key in known}
        return {"type": "json_schema", "json_schema": {"type": kind, **bounds}}

    def _string(self, schema: Mapping[str, Any], at: str) -> Form:
        least, most = _count_of(schema, "minLength", at) or 0, _count_of(schema, "maxLength", at)
        quote = self._text.quote
        times = f"{{{least},{'' if most is None else most}}}"
        if quote:
            free = not least and most is None
            barred = re.escape(quote[0])
            content: Form = (
                {"type": "any_text"}
                if free
                else {"type": "regex", "pattern": f"[^{barred}\\n]{times}"}
            )
            return {"type": "tag", "begin": quote, "content": content, "end": quote}
        character = rf'([^"\\\x00-\x1f]|{_ESCAPED})'
        return {"type": "regex", "pattern": f'"{character}{times}"'}

    def _array(self, schema: Mapping[str, Any], at: str) -> Form:
        least, most = _count_of(schema, "minItems", at) or 0, _count_of(schema, "maxItems", at)
        if least > _MOST_ITEMS or (most or 0) > _MOST_ITEMS or (most is not None and most < least):
            raise NotFollowed(at, f"minItems and maxItems of at most {_MOST_ITEMS}")
        between = _const(self._text.separator)

        def items(index: int) -> Form:
            if most is None and index == max(least, 1):
                again = _sequence([between, self._value(schema.get("items"), f"{at}/items")])
                return {
                    "type": "tags_with_separator",
                    "tags": [{"begin": "", "content": again, "end": ""}],
                    "separator": "",
                }
            if index == most:
                return NOTHING
            item = self._value(schema.get("items"), f"{at}/items")
            one = _sequence([*([between] if index else []), item, items(index + 1)])
            return one if index < least else _or([one, NOTHING])

        return _sequence([_const("["), items(0), _const("]")])

    def _fields(self, schema: Mapping[str, Any], key_text: str, at: str) -> Form:
        """Return properties with their separators; those that are not required may be left out."""
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise NotFollowed(at, "an object for properties and a list for required")
        if any(each not in properties for each in required if isinstance(each, str)):
            raise NotFollowed(f"{at}/required", "names in properties")
        others = schema.get("additionalProperties", True)
        if not isinstance(others, bool | Mapping):
            raise NotFollowed(f"{at}/additionalProperties", "a schema")
        names = list(properties)
        ways: list[Form] = []
        for first, name in enumerate(names):
            rest = (
                self._field(properties, each, key_text, at, needed=each in required)
                for each in names[first + 1 :]
            )
            ways.append(_sequence([self._written(properties, name, key_text, at), *rest]))
            if name in required:
                return _or(ways)
        return _or([*ways, NOTHING])

    def _field(
        self, properties: Mapping[str, Any], name: str, key_text: str, at: str, *, needed: bool
    ) -> Form:
        written = self._written(properties, name, key_text, at)
        one = _sequence([_const(self._text.separator), written])
        return one if needed else _or([one, NOTHING])

    def _written(self, properties: Mapping[str, Any], name: str, key_text: str, at: str) -> Form:
        where = f"{at}/properties/{name}"
        python = key_text.endswith("=")
        if not _BARE.fullmatch(name) or (
            python and (not name.isidentifier() or keyword.iskeyword(name))
        ):
            raise NotFollowed(where, "a name of letters, digits and underscores")
        key = _const(key_text.replace("{key}", name))
        return _sequence([key, self._value(properties[name], where)])

    def _any_of(self, several: object, at: str, how: str) -> Form:
        if not isinstance(several, list) or not several:
            raise NotFollowed(at, "a list of schemas")
        if how == "oneOf":
            kinds = [each.get("type") for each in several if isinstance(each, Mapping)]
            texts = [each for each in kinds if isinstance(each, str)]
            apart = len(set(texts)) == len(several) and not {"integer", "number"} <= set(texts)
            if not apart:
                raise NotFollowed(at, "schemas of types that differ")
        return _or([self._value(each, f"{at}/{index}") for index, each in enumerate(several)])

    def _constants(self, values: object, types: object, at: str) -> Form:
        if not isinstance(values, list):
            raise NotFollowed(f"{at}/enum", "a list")
        allowed = None if types is None else types if isinstance(types, list) else [types]
        those = [each for each in values if allowed is None or set(_types_of(each)) & {*allowed}]
        if not those:
            raise NotFollowed(f"{at}/enum", "values of its type")
        self._count(at, len(those))
        return _or([_const(self._constant(each, at)) for each in those])

    def _constant(self, value: object, at: str) -> str:
        true, false, null = self._text.words
        if value is None:
            return null
        if isinstance(value, bool):
            return true if value else false
        if isinstance(value, int):
            return str(value)
        quote = self._text.quote
        if not isinstance(value, str):
            raise NotFollowed(at, "texts, integers, booleans and null")
        if quote and quote not in value:
            return f"{quote}{value}{quote}"
        if quote or re.search(r'["\\\x00-\x1f]', value):
            raise NotFollowed(at, f"other values than {value!r}")
        return f'"{value}"'

    def _defined(self, reference: object, at: str) -> object:
        found = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", str(reference))
        named = self._root.get(found[1]) if found else None
        if found is None or not isinstance(named, Mapping) or found[2] not in named:
            raise NotFollowed(f"{at}/$ref", "a schema of $defs")
        return named[found[2]]

    def _count(self, at: str, more: int = 1) -> None:
        self._left -= more
        if self._left < 0:
            raise NotFollowed(at, f"at most {MAX_TAG_ELEMENTS} schemas, references written out")


_DEFINITIONS = ("$defs", "definitions")


def elements_of(form: object) -> int:
    """Return the number of elements of a structural tag."""
    return sum(1 for _ in _elements(form))


def _elements(form: object) -> Iterator[None]:
    if isinstance(form, Mapping):
        if "type" in form:
            yield None
        for name, each in form.items():
            if name != "json_schema":
                yield from _elements(each)
    elif isinstance(form, list):
        for each in form:
            yield from _elements(each)


def _types_of(value: object) -> tuple[str, ...]:
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case str():
            return ("string",)
    return ()


def _const(value: str) -> Form:
    return {"type": "const_string", "value": value}


def _sequence(elements: Sequence[Form]) -> Form:
    return {"type": "sequence", "elements": [*elements]} if len(elements) != 1 else elements[0]


def _or(elements: Sequence[Form]) -> Form:
    return {"type": "or", "elements": [*elements]} if len(elements) != 1 else elements[0]


def _count_of(schema: Mapping[str, Any], name: str, at: str) -> int | None:
    value = schema.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 10_000:
        raise NotFollowed(f"{at}/{name}", "an integer, 0 to 10,000")
    return value


def _only(schema: Mapping[str, Any], known: frozenset[str], at: str) -> None:
    for name, value in schema.items():
        if name not in known and restricts(name, value):
            raise NotFollowed(f"{at}/{name}", ", ".join(sorted(known)))
