"""Answers unexpected exceptions with 500, below the other layers.

Starlette's own handler is above them all. There an answer would lack the request's id, the headers
that browsers need, and a place in the counters.
"""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.router.middleware.answer import send_error
from tandem.router.openai.errors import answer_of

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
