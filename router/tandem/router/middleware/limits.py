"""Refuses bodies above the limit before, or while, they are read."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.router.middleware.answer import send_error
from tandem.router.openai.errors import HttpProblem, body_too_large


class BodyLimit:
    """A declared length is refused at once, an undeclared one when it has grown too large."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limit:
            await send_error(send, body_too_large(self._limit))
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limit:
                raise HttpProblem(body_too_large(self._limit))
            return message

        await self._app(scope, counted, send)
