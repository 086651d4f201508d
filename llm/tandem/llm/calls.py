"""Work that another thread's event loop does while this one waits for it.

Ctrl-C may reach whoever waits at any moment, also before he has learned that his work has begun:
then it must not go on for nobody, with a whole batch in the engine.
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
    """To a loop that is going to end: once it is shut nobody's work gets in, so that all that did
    is found there, and ended, and nobody waits for what never runs."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.is_shut = False

    def shut(self) -> None:
        """For good."""
        with self._lock:
            self.is_shut = True

    def post(self, called: _Called[_Result], loop: asyncio.AbstractEventLoop) -> Future[_Result]:
        """Begin it in ``loop``. Raises RequestFailed where that is too late."""
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
    """What ``work`` returns or raises in ``loop``, which runs in another thread. Whatever ends the
    wait ends the work: TimeoutError after ``timeout`` seconds, KeyboardInterrupt as well. Raises
    RequestFailed where the loop ends, or has."""
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
    """Lives in the loop."""

    def __init__(self, work: Coroutine[Any, Any, _Result]) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None

    async def run(self) -> _Result:
        """Do it."""
        self._task = asyncio.current_task()
        return await self._work

    def give_up(self) -> None:
        """Nobody waits for it. Comes behind the work's start, if that was ever asked for."""
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()
