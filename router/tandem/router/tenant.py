"""The tenant that a request belongs to: the API key that it came with, as a short digest.

``middleware/auth`` and gRPC set the tenant of a call once its key is known. Shared resources
(admission, CPU pool, request bodies, stored responses, gRPC buffers) are divided by tenant, and
what a tenant may read is bound to it.
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


@dataclass(frozen=True, slots=True)
class Tenant:
    """An API key's owner, or everyone if the router has no API keys."""

    id: str
    """16 hexadecimal digits, the same for the same key in every router; empty without keys."""
    is_admin: bool = False
    """Set if the key is an administrator's: it may read what belongs to other tenants."""

    @classmethod
    def from_key(cls, key: bytes, *, is_admin: bool = False) -> Tenant:
        """Return the tenant of an API key that was accepted."""
        digest = hashlib.blake2b(key, digest_size=8, person=b"tandem-tenant")
        return cls(digest.hexdigest(), is_admin)

    def may_read(self, owner: str) -> bool:
        """Return whether it may read what belongs to the tenant with the id ``owner``."""
        return self.is_admin or self.id == owner


NO_KEYS = Tenant("")
"""The tenant of every request if the router has no API keys, and of requests before their check."""

current_tenant: ContextVar[Tenant] = ContextVar("tandem_tenant", default=NO_KEYS)
"""The tenant of the call that the current task serves."""


def tenant_id() -> str:
    """Return the id of the tenant that the current task serves."""
    return current_tenant.get().id


def salted(asked: str | None) -> str | None:
    """Return the cache salt of a request of the current tenant with the salt ``asked``.

    The id of the tenant is a prefix of the salt, so no other tenant can use the same one.
    """
    tenant = tenant_id()
    if not tenant:
        return asked
    return tenant if asked is None else f"{tenant}:{asked}"
