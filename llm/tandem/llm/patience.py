"""How long an engine may say nothing to any of many who wait for it, by one timer for all of them.

What is sent at once is answered one after the other: how long one of them waits says how many are
before it, not whether the engine works. A timeout of its own would also cost each wait as much as a
tenth of all that is done for a prompt that is pooled.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Patience:
    """``async with`` it: TimeoutError is raised there when somebody waits, and too long ago a
    wait was over last, or the first began."""

    def __init__(self, seconds: float) -> None:
        """For silences of at most so many seconds. Belongs to one task."""
        self._seconds = seconds
        self._limit = asyncio.timeout(None)
        self._waits = 0
        self._heard = 0.0
        """When the last wait ended, or the first one began."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """A wait begins: where others wait already, they are no better off for it."""
        if not self._waits:
            self._heard = self._loop.time()
        self._waits += 1
        if self._timer is None:
            self._look()

    def end(self) -> None:
        """One of the waits is over."""
        self._waits -= 1
        self._heard = self._loop.time()

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def _look(self) -> None:
        """Come again when the silence that is now would be too long."""
        self._timer = None
        if not self._waits:
            return
        due = self._heard + self._seconds
        if due <= self._loop.time():
            self._limit.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_at(due, self._look)
