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
    """Whether the key is an administrator's: it may read what belongs to other tenants."""

    @classmethod
    def from_key(cls, key: bytes, *, is_admin: bool = False) -> Tenant:
        """Return the tenant of an API key that was accepted."""
        digest = hashlib.blake2b(key, digest_size=8, person=b"tandem-tenant")
        return cls(digest.hexdigest(), is_admin)


NO_KEYS = Tenant("")
"""The tenant of every request if the router has no API keys, and of requests before their check."""

current_tenant: ContextVar[Tenant] = ContextVar("tandem_tenant", default=NO_KEYS)
"""The tenant of the call that the current task serves."""
