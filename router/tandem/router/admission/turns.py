"""Who begins what takes some milliseconds of the loop: one in each of its rounds.

A loop does all that is ready before it looks at its sockets again: ten prompts that are read and
placed in one moment kept every running stream waiting for all ten (bench/router/burst.py). So do
the streams of a worker that is lost, and requests that waited for the same thing.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """One request begins in each round of the event loop, by HTTP or by gRPC, or goes on
    elsewhere; one that is alone waits for nobody."""

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
