"""Asks for an API key on what costs something or tells of requests; probes stay open."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.router.middleware.answer import send_error
from tandem.router.openai.errors import not_authorized
from tandem.router.ui import page as ui

logger = logging.getLogger(__name__)

OPEN = frozenset({"/", "/health", "/ready", "/version", "/metrics"}) | ui.PATHS


class ApiKeys:
    """``Authorization: Bearer KEY`` with one of the keys, or ``x-api-key: KEY``."""

    def __init__(self, app: ASGIApp, keys: KnownKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        is_open = scope["type"] != "http" or scope["path"] in OPEN or _is_canary(scope)
        if is_open or self._keys.allow(dict(scope["headers"])):
            await self._app(scope, receive, send)
        else:
            await send_error(scope, send, not_authorized())


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
