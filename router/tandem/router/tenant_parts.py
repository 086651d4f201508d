"""Entries of a bounded store by tenant: the tenant that holds most makes room.

Used by stored responses and by the records of the last calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_Name = TypeVar("_Name", bound=Hashable)


@dataclass(slots=True)
class _Part(Generic[_Name]):
    """Entries of one tenant, the one used longest ago first, with their sizes."""

    sizes: OrderedDict[_Name, int] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class TenantParts(Generic[_Name]):
    """Entries and bytes of each tenant."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes of all tenants."""
        self._parts: dict[str, _Part[_Name]] = {}
        self._tenant_of: dict[_Name, str] = {}

    def count(self, tenant: str) -> int:
        """Return the number of a tenant's entries."""
        part = self._parts.get(tenant)
        return 0 if part is None else len(part.sizes)

    def owner(self, name: _Name) -> str | None:
        """Return the tenant that holds an entry, or None if it is not here."""
        return self._tenant_of.get(name)

    def add(self, tenant: str, name: _Name, size: int) -> None:
        """Add an entry of ``size`` bytes, which no tenant holds yet."""
        part = self._parts.setdefault(tenant, _Part())
        part.sizes[name] = size
        self._tenant_of[name] = tenant
        self._grow(part, size)

    def grow(self, tenant: str, size: int) -> None:
        """Count bytes that several entries of a tenant share; negative if they are freed."""
        self._grow(self._parts.setdefault(tenant, _Part()), size)
        self._forget_if_empty(tenant)

    def use(self, name: _Name) -> None:
        """Move an entry to the end of its tenant's entries."""
        self._parts[self._tenant_of[name]].sizes.move_to_end(name)

    def remove(self, name: _Name) -> None:
        """Forget an entry."""
        tenant = self._tenant_of.pop(name)
        part = self._parts[tenant]
        self._grow(part, -part.sizes.pop(name))
        self._forget_if_empty(tenant)

    def first_to_go(self, *, by_bytes: bool) -> _Name:
        """Return the oldest entry of the tenant that has most entries, or most bytes."""
        parts = [each for each in self._parts.values() if each.sizes]
        largest = max(parts, key=lambda each: each.num_bytes if by_bytes else len(each.sizes))
        return next(iter(largest.sizes))

    def oldest(self) -> list[_Name]:
        """Return the oldest entry of each tenant."""
        return [next(iter(each.sizes)) for each in self._parts.values() if each.sizes]

    def _grow(self, part: _Part[_Name], size: int) -> None:
        part.num_bytes += size
        self.num_bytes += size

    def _forget_if_empty(self, tenant: str) -> None:
        part = self._parts[tenant]
        if not part.sizes and not part.num_bytes:
            del self._parts[tenant]
