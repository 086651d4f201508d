"""Turns for work that takes some milliseconds of the loop: one begins in each of the loop's rounds.

A loop runs all ready callbacks before it polls its sockets again. Ten prompts that are read and
placed in one moment would keep every running stream waiting for all ten. The same holds for the
streams of a lost worker, and for requests that waited for the same event. Tenants that wait take
rounds by turns.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from tandem.protocol.fair_order import FairOrder


class Turns:
    """Turns of requests: in each round of the event loop one request begins, by HTTP or by gRPC, or
    goes on in a thread. A single request does not wait."""

    def __init__(self, *, tenant: Callable[[], str] = str) -> None:
        """``tenant`` returns the tenant of the current task."""
        self._tenant = tenant
        self._order = FairOrder()
        self._number = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """A heap, by tag and number."""
        self._taken = False
        """Set if this round is taken."""

    async def take(self) -> None:
        """Wait for a round of one's own."""
        loop = asyncio.get_running_loop()
        if self._taken:
            waits = loop.create_future()
            self._number += 1
            start = self._order.enter(self._tenant(), 1)
            heapq.heappush(self._waiting, (start, self._number, waits))
            await waits
            return
        self._taken = True
        loop.call_soon(self._next)

    def _next(self) -> None:
        while self._waiting:
            start, _, first = heapq.heappop(self._waiting)
            if not first.done():  # else its client has gone
                self._order.begin(start)
                first.set_result(None)
                # Behind the round in which it begins.
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._taken = False
