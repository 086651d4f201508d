"""What all bodies of requests have in common: strict types, and a word on every name in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from tandem.router.openai.parameters import Refused
from tandem.router.openai.unknown_fields import UnknownFields


class Body(BaseModel):
    """A JSON object. Strict: a number in quotes is not a number, true is not 1."""

    model_config = ConfigDict(strict=True, extra="allow")

    REFUSED: ClassVar[Mapping[str, Refused]] = {}
    """What is known by name and not done."""

    def check(self, unknown: UnknownFields, prefix: str = "") -> None:
        """Raise InvalidParameter for what is not done, here and in the objects below."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Body):
                value.check(unknown, f"{prefix}{name}.")
        for name, value in (self.model_extra or {}).items():
            refused = self.REFUSED.get(name)
            if refused is None:
                unknown.meet(prefix, name, value, (*type(self).model_fields, *self.REFUSED))
            else:
                refused.check(f"{prefix}{name}", value)
