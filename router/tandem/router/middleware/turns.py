"""Requests that come at once begin one after the other, with a look at all sockets between.

Whatever a request is read and placed by takes some milliseconds of the loop, and a loop does all
that is ready before it looks at its sockets again: ten prompts in one moment kept every running
stream waiting for all ten (bench/router/burst.py).
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send


class Turns:
    """One request begins in each round of the event loop, by HTTP or by gRPC; one that is alone
    waits for nobody."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False
        """This round is somebody's."""

    async def take(self) -> None:
        """Wait for a round of one's own."""
        loop = asyncio.get_running_loop()
        if self._taken:
            waits = loop.create_future()
            self._waiting.append(waits)
            await waits
            return
        self._taken = True
        loop.call_soon(self._next)

    def _next(self) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # else its client has gone
                first.set_result(None)
                # Behind the round in which it begins.
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._taken = False


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
