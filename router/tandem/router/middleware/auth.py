"""Asks for an API key on what costs something or tells of requests; probes stay open."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.router.middleware.answer import send_error
from tandem.router.openai.errors import ErrorAnswer, no_administration, not_authorized
from tandem.router.ui import page as ui

logger = logging.getLogger(__name__)

OPEN = frozenset({"/", "/health", "/ready", "/version", "/metrics"}) | ui.PATHS
ADMINISTRATION = frozenset(
    {
        *("/abort_requests", "/log_level", "/reset_prefix_cache", "/server_info"),
        *("/sleep", "/wake_up", "/is_sleeping", "/start_profile", "/stop_profile"),
    }
)
"""What changes the server for everybody."""


class ApiKeys:
    """``Authorization: Bearer KEY`` with one of the keys, or ``x-api-key: KEY``.

    What administers takes keys of its own, which open everything else, too: a client's key is not
    enough to slow down all the others.
    """

    def __init__(self, app: ASGIApp, keys: KnownKeys | None, admin: KnownKeys | None) -> None:
        """``keys``: None where clients need none. ``admin``: None where nobody administers, unless
        there are no keys at all."""
        self._app = app
        self._keys = keys
        self._admin = admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        is_open = scope["type"] != "http" or scope["path"] in OPEN or _is_canary(scope)
        answer = None if is_open else self._refusal(scope["path"], dict(scope["headers"]))
        if answer is None:
            await self._app(scope, receive, send)
        else:
            await send_error(scope, send, answer)

    def _refusal(self, path: str, headers: Mapping[bytes, bytes]) -> ErrorAnswer | None:
        if self._admin is not None and self._admin.allow(headers):
            return None
        if path in ADMINISTRATION:
            return not_authorized() if self._admin is not None else no_administration()
        if self._keys is None or self._keys.allow(headers):
            return None
        return not_authorized()


class KnownKeys:
    """The API keys: those of flags, and those of a folder, which may change."""

    def __init__(self, keys: Sequence[str], keys_dir: str | None = None) -> None:
        """``keys_dir`` holds more keys, a file each; it is read anew when it changes."""
        self._keys = [key.encode() for key in keys]
        self._dir = Path(keys_dir) if keys_dir else None
        self._from_dir: tuple[float, list[bytes]] = (-1.0, [])

    def allow(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether ``authorization: Bearer KEY``, or else ``x-api-key``, has one of them."""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            token = headers.get(b"x-api-key", b"")
        # Compare with every key, in the same time whichever it is.
        known = [*self._keys, *self._read_dir()]
        matches = [hmac.compare_digest(token.strip(), key) for key in known]
        return any(matches)

    def _read_dir(self) -> list[bytes]:
        if self._dir is None:
            return []
        try:
            changed = self._dir.stat().st_mtime
            if changed != self._from_dir[0]:
                files = [path for path in self._dir.iterdir() if path.is_file()]
                keys = [path.read_bytes().strip() for path in files]
                self._from_dir = (changed, [key for key in keys if key])
        except OSError as error:
            logger.warning("API keys cannot be read, those known stay: %s", error)
        return self._from_dir[1]


def _is_canary(scope: Scope) -> bool:
    """Whether it is the canary, whose token the middleware around this one has checked."""
    return scope.get("state", {}).get("route") is not None
