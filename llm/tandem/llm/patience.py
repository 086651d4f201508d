"""One timeout for many concurrent waits on an engine.

Requests that are sent together are answered one after the other. So the length of one wait depends
on the requests before it, and not on the engine's health. Separate timeouts would also cost up to a
tenth of all work for a pooled prompt.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Patience:
    """Async context manager that raises TimeoutError if no wait ends for too long. The time runs
    from the end of the last wait, or from the start of the first."""

    def __init__(self, seconds: float) -> None:
        """Allow at most ``seconds`` between ends of waits. Belongs to one task."""
        self._seconds = seconds
        self._limit = asyncio.timeout(None)
        self._waits = 0
        self._heard = 0.0
        """Time when the last wait ended, or the first one began."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start a wait. It does not extend the deadline of waits that already run."""
        if not self._waits:
            self._heard = self._loop.time()
        self._waits += 1
        if self._timer is None:
            self._look()

    def end(self) -> None:
        """End one of the waits."""
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
        """Raise the timeout if it is due, or schedule the next check."""
        self._timer = None
        if not self._waits:
            return
        due = self._heard + self._seconds
        if due <= self._loop.time():
            self._limit.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_at(due, self._look)
