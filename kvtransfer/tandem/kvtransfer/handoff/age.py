"""Order of hand-offs, in which keys that want slots are served. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.protocol.ids import RequestKey


class Age:
    """A number per key, given when the key is first seen and kept until it is forgotten."""

    def __init__(self) -> None:
        self._numbers: dict[RequestKey, int] = {}
        self._next = 0

    def note(self, key: RequestKey) -> None:
        """Add a key as the youngest; a known one keeps its place."""
        if key not in self._numbers:
            self._numbers[key] = self._next
            self._next += 1

    def forget(self, key: RequestKey) -> None:
        """Forget the key; if it comes again, it is the youngest."""
        self._numbers.pop(key, None)

    def order(self, keys: Iterable[RequestKey]) -> list[RequestKey]:
        """Return the known keys, the oldest first."""
        return sorted(keys, key=self._numbers.__getitem__)

    def copy(self) -> Age:
        """Return an independent copy."""
        other = Age()
        other._numbers = dict(self._numbers)
        other._next = self._next
        return other
