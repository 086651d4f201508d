"""Answers unexpected exceptions with 500, below the other layers.

Starlette's own handler is above them all. There an answer would lack the request's id, the headers
that browsers need, and a place in the counters.
"""

from __future__ import annotations

import logging

from starlette.types import (
    ASGIApp,
    Message,
    Receive,
    Scope,
    Send,
)

from tandem.router.dispatch.admission import Turns
from tandem.router.http.errors import ErrorAnswer, answer_of, error_body


async def send_error(scope: Scope, send: Send, answer: ErrorAnswer) -> None:
    """Send the whole answer."""
    body = error_body(scope, answer)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **answer.headers,
    }
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class InTurn:
    """A POST takes a turn before the application reads it; nothing else may take long to begin."""

    def __init__(self, app: ASGIApp, turns: Turns) -> None:
        self._app = app
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for a turn, if it is a request that may take long to begin."""
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._turns.take()
        await self._app(scope, receive, send)


logger = logging.getLogger(__name__)


class Unexpected:
    """The innermost layer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            logger.exception("%s %s failed", scope["method"], scope.get("route"))
            await send_error(scope, send, answer_of(error))
