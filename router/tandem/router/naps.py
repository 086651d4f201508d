"""Sleeps that report their delay, for code that judges other processes by the clock.

A loop that was blocked (by a computation, or by the machine) wakes late, with everything received
meanwhile still unread. Code that measures silence subtracts that time first.
"""

from __future__ import annotations

import asyncio


class Naps:
    """Naps of one length, one after the other, inside a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds

    async def sleep(self) -> float:
        """Sleep once; return the seconds by which it was too long."""
        wake = self._loop.time() + self._seconds
        await asyncio.sleep(self._seconds)
        return max(0.0, self._loop.time() - wake)
