"""Common part of all request bodies: strict types, and a check of every field name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from tandem.router.api.openai.bodies.hints import Hint, Reading
from tandem.router.api.openai.bodies.parameters import Refused
from tandem.router.http.errors import ErrorAnswer, HttpProblem

SLICE_BYTES = 1 << 18
CONTAINER_SHARE = 10
"""Ratio of allowed values to allowed objects and lists."""
_NOT_BRACKETS = bytes(each for each in range(256) if each not in b"[]{}")


def check_shape(body: bytes, *, max_values: int, max_depth: int) -> None:
    """Raise HttpProblem (413, or 400 for the depth) if the body holds too much."""
    counted = _Counted(max_values, max_depth)
    start = 0
    while start < len(body):
        part = body[start : start + SLICE_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # never between a backslash and its letter
            part = body[start : start + len(part) + 1]
        start += len(part)
        counted.take(part)


class _Counted:
    """Counters over the bytes so far."""

    def __init__(self, max_values: int, max_depth: int) -> None:
        self._max_values = max_values
        self._max_depth = max_depth
        self._num_values = 1
        self._num_containers = 0
        self._depth = 0
        self._in_text = False

    def take(self, part: bytes) -> None:
        if b"\\" in part:
            part = part.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        pieces = part.split(b'"')
        outside = b"".join(pieces[int(self._in_text) :: 2])
        if len(pieces) % 2 == 0:
            self._in_text = not self._in_text
        brackets = outside.translate(None, _NOT_BRACKETS)
        opened = brackets.count(b"[") + brackets.count(b"{")
        self._num_containers += opened
        self._num_values += opened + outside.count(b",") + outside.count(b":")
        self._check_counts()
        self._go_down(brackets)

    def _check_counts(self) -> None:
        most = self._max_values
        if self._num_values > most:
            raise too_many("values", most)
        if self._num_containers > most // CONTAINER_SHARE:
            raise too_many("objects and lists", most // CONTAINER_SHARE)

    def _go_down(self, brackets: bytes) -> None:
        depth = self._depth
        for each in brackets:
            depth += 1 if each in b"[{" else -1
            if depth > self._max_depth:
                raise _too_deep(self._max_depth)
        self._depth = depth


def too_many(what: str, limit: int) -> HttpProblem:
    """Return the 413 for a body with too much."""
    return HttpProblem(
        ErrorAnswer(
            status=413,
            message=f"The body holds more than {limit} {what}",
            type="invalid_request_error",
            code="request_too_large",
        )
    )


def _too_deep(limit: int) -> HttpProblem:
    return HttpProblem(
        ErrorAnswer(
            status=400,
            message=f"The body nests objects and lists more than {limit} deep",
            type="invalid_request_error",
            code="body_too_deep",
        )
    )


_TEXT = {"type": "string", "minLength": 1}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _one_or_several(*kinds: dict[str, Any]) -> WithJsonSchema:
    several = {"type": "array", "items": {"anyOf": [*kinds]}, "minItems": 1}
    return WithJsonSchema({"anyOf": [*kinds, several]})


Prompts = Annotated[Any, _one_or_several(_TEXT, _TOKENS)]
"""A text or token ids, or a list of them."""
_EXAMPLE = (  # safetensors, [1, 2] float32
    "OAAAAAAAAAB7IngiOnsiZHR5cGUiOiJGMzIiLCJzaGFwZSI6WzEsMl0sImRhdGFfb2Zmc2V0"
    "cyI6WzAsOF19fQAAAD8AAIC+"
)
_SAVED = {
    "type": "string",
    "minLength": 1,
    "contentEncoding": "base64",
    "description": "A safetensors file with one tensor [positions, hidden_size].",
    "examples": [_EXAMPLE],
}
Embeds = Annotated[
    str | list[str],
    WithJsonSchema({"anyOf": [_SAVED, {"type": "array", "items": _SAVED}]}),
]
"""A safetensors file with one tensor [positions, hidden_size], in base64, or a list of them."""
Texts = Annotated[Any, _one_or_several(_TEXT)]
_DOCUMENT = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}
Documents = Annotated[
    Any,
    WithJsonSchema({"type": "array", "items": {"anyOf": [_TEXT, _DOCUMENT]}, "minItems": 1}),
]
"""Texts, bare or in objects."""


class Body(BaseModel):
    """JSON object. Strict: a number in quotes is not a number, true is not 1."""

    model_config = ConfigDict(strict=True, extra="allow")

    REFUSED: ClassVar[Mapping[str, Refused]] = {}
    """Known fields that are not supported."""
    HINTS: ClassVar[Mapping[str, Hint]] = {}
    """Fields without effect, which are reported."""
    EXAMPLE: ClassVar[Mapping[str, Any]] = {}
    """Body that is answered with 200, without ``model``."""

    def check(self, reading: Reading, prefix: str = "") -> None:
        """Raise InvalidParameter for unsupported fields, nested ones too; note hints."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Body):
                value.check(reading, f"{prefix}{name}.")
            if name in self.HINTS:
                self.HINTS[name].check(f"{prefix}{name}", value, reading)
        for name, value in (self.model_extra or {}).items():
            refused, hint = self.REFUSED.get(name), self.HINTS.get(name)
            if refused is not None:
                refused.check(f"{prefix}{name}", value)
            elif hint is not None:
                hint.check(f"{prefix}{name}", value, reading)
            else:
                known = (*type(self).model_fields, *self.REFUSED, *self.HINTS)
                reading.meet(prefix, name, value, known)
