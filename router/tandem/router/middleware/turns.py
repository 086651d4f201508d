"""Begins concurrent requests one after the other, with a poll of all sockets between them."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.router.admission.turns import Turns


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
