"""The common part of all request bodies: strict types, and a check of every field name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from tandem.router.openai.bodies.hints import Hint
from tandem.router.openai.bodies.parameters import Refused
from tandem.router.openai.bodies.reading import Reading

_TEXT = {"type": "string", "minLength": 1}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _one_or_several(*kinds: dict[str, Any]) -> WithJsonSchema:
    several = {"type": "array", "items": {"anyOf": [*kinds]}, "minItems": 1}
    return WithJsonSchema({"anyOf": [*kinds, several]})


Prompts = Annotated[Any, _one_or_several(_TEXT, _TOKENS)]
"""A text or token ids, or a list of them; its reader checks it."""
_EXAMPLE = (  # safetensors, [1, 2] float32: of a model whose hidden size is 2
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
"""A text or a list of texts; its reader checks it."""
_DOCUMENT = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}
Documents = Annotated[
    Any,
    WithJsonSchema({"type": "array", "items": {"anyOf": [_TEXT, _DOCUMENT]}, "minItems": 1}),
]
"""A list of texts, each bare or in an object; its reader checks it."""


class Body(BaseModel):
    """A JSON object. Strict: a number in quotes is not a number, true is not 1."""

    model_config = ConfigDict(strict=True, extra="allow")

    REFUSED: ClassVar[Mapping[str, Refused]] = {}
    """Known fields that are not supported."""
    HINTS: ClassVar[Mapping[str, Hint]] = {}
    """Accepted without effect, and reported."""
    EXAMPLE: ClassVar[Mapping[str, Any]] = {}
    """One that is answered with 200, without ``model``."""

    def check(self, reading: Reading, prefix: str = "") -> None:
        """Raise InvalidParameter for unsupported fields, here and in objects below; note hints."""
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
