"""Tenant of a request: a short digest of its API key.

Shared resources are divided by tenant, and tenants read only their own data.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_Name = TypeVar("_Name", bound=Hashable)


@dataclass(slots=True)
class _Part(Generic[_Name]):
    """Entries of one tenant with sizes, the least recently used first."""

    sizes: OrderedDict[_Name, int] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class TenantParts(Generic[_Name]):
    """Entries and bytes of each tenant."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._parts: dict[str, _Part[_Name]] = {}
        self._tenant_of: dict[_Name, str] = {}

    def count(self, tenant: str) -> int:
        part = self._parts.get(tenant)
        return 0 if part is None else len(part.sizes)

    def owner(self, name: _Name) -> str | None:
        """Return the tenant that holds an entry, or None."""
        return self._tenant_of.get(name)

    def add(self, tenant: str, name: _Name, size: int) -> None:
        part = self._parts.setdefault(tenant, _Part())
        part.sizes[name] = size
        self._tenant_of[name] = tenant
        self._grow(part, size)

    def grow(self, tenant: str, size: int) -> None:
        """Count bytes that several entries share; negative if they are freed."""
        self._grow(self._parts.setdefault(tenant, _Part()), size)
        self._forget_if_empty(tenant)

    def use(self, name: _Name) -> None:
        """Mark an entry as used."""
        self._parts[self._tenant_of[name]].sizes.move_to_end(name)

    def remove(self, name: _Name) -> None:
        tenant = self._tenant_of.pop(name)
        part = self._parts[tenant]
        self._grow(part, -part.sizes.pop(name))
        self._forget_if_empty(tenant)

    def first_to_go(self, *, by_bytes: bool) -> _Name:
        """Return the oldest entry of the tenant with most entries or bytes."""
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


@dataclass(frozen=True, slots=True)
class Tenant:
    """Owner of an API key, or everyone if the router has no keys."""

    id: str
    """16 hexadecimal digits, equal in all routers; empty without keys."""
    is_admin: bool = False
    """Whether it is an administrator, with access to all tenants' data."""

    @classmethod
    def from_key(cls, key: bytes, *, is_admin: bool = False) -> Tenant:
        """Return the tenant of an accepted API key."""
        digest = hashlib.blake2b(key, digest_size=8, person=b"tandem-tenant")
        return cls(digest.hexdigest(), is_admin)

    def may_read(self, owner: str) -> bool:
        """Return whether it may read data of ``owner``."""
        return self.is_admin or self.id == owner


NO_KEYS = Tenant("")
"""Tenant of requests without keys, or before their check."""

current_tenant: ContextVar[Tenant] = ContextVar("tandem_tenant", default=NO_KEYS)


def tenant_id() -> str:
    """Return the id of the current task's tenant."""
    return current_tenant.get().id


def salted(asked: str | None) -> str | None:
    """Return the cache salt of a request, prefixed with the tenant's id."""
    tenant = tenant_id()
    if not tenant:
        return asked
    return tenant if asked is None else f"{tenant}:{asked}"
