"""State of reading one body: the policy for unknown fields, and the hints that it contains."""

from __future__ import annotations

import re
from collections.abc import Iterable, MutableMapping
from typing import Any

from tandem.router.openai.bodies.unknown_fields import UnknownFields

STATE = "ignored"
"""Key in a request's state of the hints that its answer reports (``middleware/trace``)."""
_INDEX = re.compile(r"\[\d+\]")


class Reading:
    """Made for each body."""

    def __init__(self, unknown: UnknownFields | None = None) -> None:
        self._unknown = UnknownFields() if unknown is None else unknown
        self.ignored: dict[str, None] = {}
        """Names of hints without effect, in the order in which they were met."""

    def meet(self, prefix: str, name: str, value: object, known: Iterable[str]) -> None:
        """Raise InvalidParameter for an unknown field, or let it pass."""
        self._unknown.meet(prefix, name, value, known)

    def ignore(self, name: str) -> None:
        """Note a hint; ``name`` is one of this server's, with or without places in lists."""
        self.ignored[_INDEX.sub("", name)] = None


def note_ignored(scope: MutableMapping[str, Any], names: Iterable[str]) -> None:
    """Have the answer to the request of an ASGI ``scope`` report hints without effect."""
    scope["state"].setdefault(STATE, {}).update(dict.fromkeys(names))
