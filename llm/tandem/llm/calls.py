"""Calls that run in another thread's event loop while the calling thread waits.

Ctrl-C may interrupt the waiting thread at any moment, even before it knows that the work has begun.
Then the work must be cancelled, or a whole batch would keep running without a caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from threading import Lock
from typing import Any, Generic, TypeVar

from tandem.protocol.errors import FailCause, RequestFailed

CLOSED = "the engine is closed"
_Result = TypeVar("_Result")


class Gate:
    """Entry to a loop that is about to end. After ``shut`` no new work is accepted. All accepted
    work is in the loop and can be cancelled, so no caller waits for work that never runs."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.is_shut = False

    def shut(self) -> None:
        """Refuse all further work."""
        with self._lock:
            self.is_shut = True

    def post(self, called: _Called[_Result], loop: asyncio.AbstractEventLoop) -> Future[_Result]:
        """Start the work in ``loop``. Raises RequestFailed if the gate is shut."""
        with self._lock:
            if self.is_shut:
                called.give_up()
                raise RequestFailed(FailCause.INTERNAL, CLOSED)
            return asyncio.run_coroutine_threadsafe(called.run(), loop)


def call(
    work: Coroutine[Any, Any, _Result],
    loop: asyncio.AbstractEventLoop,
    timeout: float | None,
    gate: Gate,
) -> _Result:
    """Return or raise the result of ``work`` in ``loop``, which runs in another thread. Any end of
    the wait cancels the work: TimeoutError after ``timeout`` seconds, and KeyboardInterrupt. Raises
    RequestFailed if the loop ends, or has ended."""
    called = _Called(work)
    try:
        return gate.post(called, loop).result(timeout)
    except CancelledError as error:  # by who ended the loop; it may not have begun
        work.close()
        raise RequestFailed(FailCause.INTERNAL, CLOSED) from error
    except BaseException:
        with suppress(RuntimeError):  # a closed loop runs nothing any more
            loop.call_soon_threadsafe(called.give_up)
        raise


class _Called(Generic[_Result]):
    """Work and its task. Used in the loop only."""

    def __init__(self, work: Coroutine[Any, Any, _Result]) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None

    async def run(self) -> _Result:
        """Await the work."""
        self._task = asyncio.current_task()
        return await self._work

    def give_up(self) -> None:
        """Cancel the work. Called in the loop after the work's start, if that was scheduled."""
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()
