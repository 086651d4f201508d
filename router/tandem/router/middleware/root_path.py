"""Serves every route below a path prefix, too, for a proxy that passes its prefix on."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Strips ``--root-path`` from the paths of requests; paths without it are served as they are.

    Runs first, so that everything after it sees one spelling of a path.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix
        self._raw_prefix = prefix.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] == "http" and (scope["path"] + "/").startswith(self._prefix + "/"):
            raw = scope["raw_path"].removeprefix(self._raw_prefix)
            path = scope["path"].removeprefix(self._prefix)
            scope = {**scope, "path": path or "/", "raw_path": raw or b"/"}
        await self._app(scope, receive, send)
