"""Access classes of routes and gRPC methods, and the check that a caller may use one.

Each route is given its class where ``app`` registers it, each gRPC method in the table of ``rpc``.
The check goes by the class of the route that was matched, never by the text of a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from tandem.router.config import RouterConfig
from tandem.router.keys import KnownKeys
from tandem.router.openai.errors import HttpProblem, no_administration, not_authorized
from tandem.router.tenant import NO_KEYS, Tenant


class Access(Enum):
    """The callers that may use a route."""

    OPEN = auto()
    """Everyone, without a key."""
    CLIENT = auto()
    """Clients: everyone if the router has no API keys."""
    CANARY = auto()
    """Clients, and the operator's canary with its token."""
    ADMIN = auto()
    """Administrators."""


class Authorizer:
    """The keys of clients and administrators, and what each may use."""

    def __init__(self, config: RouterConfig) -> None:
        self._clients = _keys(config.api_key, config.api_keys_dir, admin=False)
        self._admins = _keys(config.admin_api_key, config.admin_api_keys_dir, admin=True)
        self._open_administration = config.enable_admin_api

    @property
    def has_keys(self) -> bool:
        """Return whether any caller needs a key."""
        return self._clients is not None or self._admins is not None

    def refusals(self, access: Access) -> tuple[int, ...]:
        """Return the statuses of a request without a right key."""
        if access is Access.OPEN:
            return ()
        if access is Access.ADMIN and self._admins is None:
            return () if self._open_administration else (403,)
        keys = self._admins if access is Access.ADMIN else self._clients
        return () if keys is None else (401,)

    def check(self, access: Access, headers: Mapping[bytes, bytes]) -> Tenant:
        """Return the caller's tenant. Raises HttpProblem if it may not use what has this class."""
        if access is Access.OPEN:
            return NO_KEYS
        admin = self._admins and self._admins.find(headers)
        if admin:
            return admin
        if access is Access.ADMIN:
            if self._admins is not None:
                raise HttpProblem(not_authorized())
            if not self._open_administration:
                raise HttpProblem(no_administration())
            return NO_KEYS
        if self._clients is None:
            return NO_KEYS
        client = self._clients.find(headers)
        if client is None:
            raise HttpProblem(not_authorized())
        return client


def _keys(keys: tuple[str, ...], folder: str | None, *, admin: bool) -> KnownKeys | None:
    return KnownKeys(keys, folder, admin=admin) if keys or folder else None
