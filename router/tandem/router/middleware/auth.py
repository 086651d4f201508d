"""Asks for an API key on what costs something or tells of requests; probes stay open."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.router.middleware.answer import send_error
from tandem.router.openai.errors import not_authorized

OPEN = frozenset({"/health", "/ready", "/version", "/metrics"})


class ApiKeys:
    """``Authorization: Bearer KEY`` with one of the keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] != "http" or scope["path"] in OPEN or self._allows(scope):
            await self._app(scope, receive, send)
        else:
            await send_error(send, not_authorized())

    def _allows(self, scope: Scope) -> bool:
        given: bytes = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        # Compare with every key, in the same time whichever it is.
        matches = [hmac.compare_digest(token.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)
