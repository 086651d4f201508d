"""Access classes of routes and gRPC methods, and the check of a caller's key.

The check uses the class of the matched route, never the text of a path.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route
from starlette.types import (
    ASGIApp,
    Receive,
    Scope,
    Send,
)

from tandem.router.config import RouterConfig
from tandem.router.http.errors import HttpProblem, no_administration, not_authorized
from tandem.router.tenant import NO_KEYS, Tenant

logger = logging.getLogger(__name__)

SHARE = 20
"""Ratio of the seconds between checks of the files to the last check's."""
SETTLED_NS = 100_000_000
"""Age from which a file's times identify its version; younger files are always read."""
MAX_KEY_BYTES = 4_096


class KnownKeys:
    """Keys of one kind of caller."""

    def __init__(self, keys: Sequence[str], folder: str | None = None, *, admin: bool) -> None:
        """``folder`` holds more keys, one per file."""
        self._admin = admin
        self._given = self._tenants(key.encode() for key in keys)
        self._folder = KeyFolder(Path(folder)) if folder else None
        self._read: list[bytes] = []
        self._from_folder: list[tuple[bytes, Tenant]] = []

    def find(self, headers: Mapping[bytes, bytes]) -> Tenant | None:
        """Return the tenant of ``authorization: Bearer KEY`` or ``x-api-key``, if it is known."""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            token = headers.get(b"x-api-key", b"")
        token, found = token.strip(), None
        # Compare with every key, in constant time.
        for key, tenant in (*self._given, *self._in_folder()):
            if hmac.compare_digest(token, key):
                found = tenant
        return found

    def _in_folder(self) -> list[tuple[bytes, Tenant]]:
        if self._folder is not None:
            keys = self._folder.keys()
            if keys is not self._read:
                self._read, self._from_folder = keys, self._tenants(keys)
        return self._from_folder

    def _tenants(self, keys: Iterable[bytes]) -> list[tuple[bytes, Tenant]]:
        return [(key, Tenant.from_key(key, is_admin=self._admin)) for key in keys]


_Seen = tuple[int, int, int, int]
"""Version of a file: inode, size, and times of change."""


class KeyFolder:
    """Keys of a folder's files. Changed files are read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: list[bytes] = []
        self._files: dict[str, tuple[_Seen | None, bytes]] = {}
        """Version and content by name; None for files changed just before reading."""
        self._changed = -1
        """Time of the folder's last change."""
        self._next = 0.0
        self._problem = ""

    def keys(self) -> list[bytes]:
        """Return all keys: the same list until one has changed."""
        started = time.monotonic()
        if started >= self._next or self._entries_changed() != self._changed:
            self._look()
            ended = time.monotonic()
            self._next = ended + SHARE * (ended - started)
        return self._keys

    def _entries_changed(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return self._changed

    def _look(self) -> None:
        try:
            self._changed = self._path.stat().st_mtime_ns
            with os.scandir(self._path) as entries:
                names = sorted(entry.name for entry in entries if entry.is_file())
            files = {name: self._file(name) for name in names}
        except OSError as error:
            if str(error) != self._problem:
                logger.warning("API keys cannot be read, those known stay: %s", error)
            self._problem = str(error)
            return
        self._problem = ""
        self._files = files
        keys = [key for _, key in files.values() if key]
        if keys != self._keys:
            self._keys = keys

    def _file(self, name: str) -> tuple[_Seen | None, bytes]:
        path = self._path / name
        stat = path.stat()
        seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        before = self._files.get(name)
        if before is not None and before[0] == seen:
            return before
        with path.open("rb") as file:
            key = file.read(MAX_KEY_BYTES + 1).strip()
        is_settled = time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) > SETTLED_NS
        return seen if is_settled else None, key if len(key) <= MAX_KEY_BYTES else b""


class Access(Enum):
    """Callers that may use a route."""

    OPEN = auto()
    """Everyone, without a key."""
    CLIENT = auto()
    """Clients, or everyone if the router has no API keys."""
    CANARY = auto()
    """Clients, and the operator's canary."""
    ADMIN = auto()


class Authorizer:
    """Keys of clients and administrators."""

    def __init__(self, config: RouterConfig) -> None:
        self._clients = _keys(config.api_key, config.api_keys_dir, admin=False)
        self._admins = _keys(config.admin_api_key, config.admin_api_keys_dir, admin=True)
        self._open_administration = config.enable_admin_api

    @property
    def has_keys(self) -> bool:
        """Return whether any caller requires a key."""
        return self._clients is not None or self._admins is not None

    def refusals(self, access: Access) -> tuple[int, ...]:
        """Return the statuses of a request without a valid key."""
        if access is Access.OPEN:
            return ()
        if access is Access.ADMIN and self._admins is None:
            return () if self._open_administration else (403,)
        keys = self._admins if access is Access.ADMIN else self._clients
        return () if keys is None else (401,)

    def check(self, access: Access, headers: Mapping[bytes, bytes]) -> Tenant:
        """Return the caller's tenant. Raises HttpProblem without access."""
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


class RouteTable:
    """Matcher of routes; ``Dispatch`` runs the matched one."""

    def __init__(self, routes: Sequence[tuple[BaseRoute, Access]]) -> None:
        self._routes = routes

    def match(self, scope: Scope) -> Access:
        """Store the route of a request in the scope, and return its access class.

        A path without a route has the class of clients.
        """
        partial: tuple[BaseRoute, Access, Scope] | None = None
        for route, access in self._routes:
            match, child_scope = route.matches(scope)
            if match is Match.FULL or (match is Match.PARTIAL and partial is None):
                partial = route, access, child_scope
            if match is Match.FULL:
                break
        if partial is None:
            scope["route"] = None
            return Access.CLIENT
        route, access, child_scope = partial
        scope.update(child_scope)
        scope["route"] = route
        return access

    def methods(self, scope: Scope) -> list[str]:
        met = [route for route, _ in self._routes if route.matches(scope)[0] is not Match.NONE]
        found = [route.methods or () for route in met if isinstance(route, Route)]
        return sorted({method for methods in found for method in methods})


class Dispatch:
    """Runs the matched route, instead of Starlette's own matching."""

    def __init__(self, router: ASGIApp) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._router(scope, receive, send)
            return
        route: BaseRoute | None = scope["route"]  # a request without a check has none, and fails
        if route is None:
            raise HTTPException(404)
        await route.handle(scope, receive, send)
