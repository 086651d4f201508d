"""Sleeps that say by how much they were too long, for those who judge others by the clock.

A loop that was held (by a computation, or by the machine) wakes late, with everything that came
meanwhile still unread: whoever measures silence takes that time off first.
"""

from __future__ import annotations

import asyncio


class Naps:
    """Naps of one length, one after the other, inside a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds

    async def sleep(self) -> float:
        """Sleep once; seconds by which it was longer than wanted."""
        wake = self._loop.time() + self._seconds
        await asyncio.sleep(self._seconds)
        return max(0.0, self._loop.time() - wake)
