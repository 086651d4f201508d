"""The tenant that a request belongs to: the API key that it came with, as a short digest.

``middleware/auth`` and gRPC set the tenant of a call once its key is known. Shared resources
(admission, CPU pool, request bodies, stored responses, gRPC buffers) are divided by tenant, and
what a tenant may read is bound to it.
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass


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
