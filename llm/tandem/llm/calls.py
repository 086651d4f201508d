"""Work that another thread's event loop does while this one waits for it.

Ctrl-C may reach whoever waits at any moment, also before he has learned that his work has begun:
then it must not go on for nobody, with a whole batch in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")


def call(
    work: Coroutine[Any, Any, _Result], loop: asyncio.AbstractEventLoop, timeout: float | None
) -> _Result:
    """What ``work`` returns or raises in ``loop``, which runs in another thread. Whatever ends the
    wait ends the work: TimeoutError after ``timeout`` seconds, KeyboardInterrupt as well."""
    called = _Called(work)
    try:
        return asyncio.run_coroutine_threadsafe(called.run(), loop).result(timeout)
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
