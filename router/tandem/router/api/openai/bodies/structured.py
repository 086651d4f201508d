"""Form of an answer: OpenAI's ``response_format`` or vLLM's ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import Field

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.structured import KINDS
from tandem.router.api.openai.bodies import parameters
from tandem.router.api.openai.bodies.body import Body
from tandem.router.api.openai.bodies.hints import Reading
from tandem.router.api.openai.bodies.parameters import Refused

_KINDS = f"exactly one of {', '.join(KINDS[:-1])} and {KINDS[-1]}"
_SCHEMA = "response_format.json_schema.schema"


class StructuredOutputs(Body):
    """Format that the whole text matches: one of ``KINDS``."""

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.STRUCTURED_OUTPUTS

    choice: list[str] | None = Field(default=None, fail_fast=True)
    regex: str | None = None
    schema_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    backend: Literal["guidance", "outlines", "xgrammar", "lm-format-enforcer"] | None = None

    def check(self, reading: Reading, prefix: str = "") -> None:
        super().check(reading, prefix)
        given = self.given()
        kinds = [name for name in KINDS if name in given]
        if len(kinds) != 1:
            raise InvalidParameter(prefix.rstrip("."), sorted(given), _KINDS)

    def given(self) -> dict[str, Any]:
        """Return the fields of ``StructuredOutputsParams``; false is absent."""
        fields = self.model_dump(
            by_alias=True, exclude_none=True, include=set(type(self).model_fields)
        )
        fields = {
            name: value for name, value in fields.items() if value is not False or name == "json"
        }
        for name in ("json", "structural_tag"):
            if not isinstance(fields.get(name, ""), str):
                fields[name] = _text(fields[name])
        return fields


class JsonSchema(Body):
    """Schema with its name. It is always enforced."""

    REFUSED: ClassVar[Mapping[str, Refused]] = {}

    name: str | None = Field(default=None, max_length=512)
    description: str | None = Field(default=None, max_length=65_536)
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Format of the text."""

    REFUSED: ClassVar[Mapping[str, Refused]] = parameters.RESPONSE_FORMAT

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    def check(self, reading: Reading, prefix: str = "") -> None:
        if (self.json_schema is not None) is not (self.type == "json_schema"):
            allowed = 'an object with a schema for type "json_schema", else null'
            value = None if self.json_schema is None else self.json_schema.model_dump(by_alias=True)
            raise InvalidParameter(f"{prefix}json_schema", value, allowed)
        self._check_tag(prefix)
        super().check(reading, prefix)

    def _check_tag(self, prefix: str) -> None:
        given = self._tag_fields()
        if self.type != "structural_tag":
            for name, value in given.items():
                allowed = 'only with the type "structural_tag"'
                raise InvalidParameter(f"{prefix}{name}", value, allowed)
        elif [*given] not in (["format"], ["structures", "triggers"]):
            allowed = "an object, or structures and triggers in its place"
            raise InvalidParameter(f"{prefix}format", self.format, allowed)

    def _tag_fields(self) -> dict[str, Any]:
        tag = {"format": self.format, "structures": self.structures, "triggers": self.triggers}
        return {name: value for name, value in tag.items() if value is not None}

    def given(self) -> dict[str, Any]:
        """Return the fields of ``StructuredOutputsParams``; none for any text."""
        if self.type == "structural_tag":
            return {"structural_tag": _text(self._tag_fields())}
        if self.json_schema is not None:
            return {"json": _text(self.json_schema.schema_)}
        return {"json_object": True} if self.type == "json_object" else {}

    def client_names(self) -> dict[str, str]:
        """Return the client's names of fields of ``structured_outputs``."""
        if self.json_schema is not None:
            return {"structured_outputs.json": _SCHEMA}
        if self.type == "structural_tag":
            return {"structured_outputs.structural_tag": "response_format"}
        return {"structured_outputs.json_object": "response_format.type"}


def wanted_of(
    structured: StructuredOutputs | None, response: ResponseFormat | None
) -> dict[str, Any] | None:
    """Return the fields of ``StructuredOutputsParams``, or None for any text.

    Raises InvalidParameter for a request with both fields.
    """
    wanted = {} if response is None else response.given()
    if structured is None:
        return wanted or None
    if wanted:
        assert response is not None
        allowed = '"text" together with structured_outputs'
        raise InvalidParameter("response_format.type", response.type, allowed)
    return structured.given()


def _text(schema: object) -> str:
    return msgspec.json.encode(schema).decode()
