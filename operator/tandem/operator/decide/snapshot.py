"""Everything that belongs to a service, as it was read at one moment."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tandem.operator.desired.naming import Manifest


class Snapshot(msgspec.Struct, frozen=True):
    """Children by kind and name."""

    by_kind: dict[str, dict[str, Manifest]]

    def of(self, kind: str) -> Iterable[Manifest]:
        """Return the objects of a kind."""
        return self.by_kind.get(kind, {}).values()

    def names(self, kind: str) -> Iterable[str]:
        """Return the names of the objects of a kind."""
        return self.by_kind.get(kind, {}).keys()

    def find(self, kind: str, name: str) -> Manifest | None:
        """Return one object, or None."""
        return self.by_kind.get(kind, {}).get(name)
