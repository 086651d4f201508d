"""How long each of many waits may take, by one timer for all of them.

A timeout of its own costs each wait as much as a tenth of all that is done for a prompt that is
pooled.
"""

from __future__ import annotations

import asyncio
import itertools
from types import TracebackType
from typing import Self


class Patience:
    """``async with`` it: TimeoutError is raised there when one of the waits has taken too long."""

    def __init__(self, seconds: float) -> None:
        """For waits of at most so many seconds each. Belongs to one task."""
        self._seconds = seconds
        self._limit = asyncio.timeout(None)
        self._since: dict[int, float] = {}
        """When each wait began, the oldest first."""
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> int:
        """A wait begins; its number."""
        number = next(self._numbers)
        self._since[number] = self._loop.time()
        if self._timer is None:
            self._look()
        return number

    def end(self, number: int) -> None:
        """That wait is over."""
        del self._since[number]

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
        """Come again when the wait that is now the oldest would be overdue."""
        self._timer = None
        oldest = next(iter(self._since.values()), None)
        if oldest is None:
            return
        if oldest + self._seconds <= self._loop.time():
            self._limit.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_at(oldest + self._seconds, self._look)
