"""Threads for work that would hold the event loop: tokenizing, templates, parsing of large bodies.

Few threads, taken in the order of asking: however much one client asks for, work that is small runs
in the loop at once and waits for none of it. Long waits end in a refusal, so that what is queued
here stays bounded by time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from tandem.protocol.errors import Refusal, RefusalCode, RequestRefused

IN_LOOP = 8_000
"""Characters or items from which on work goes to a thread: it takes about half a millisecond."""
WAIT_SECONDS = 20.0
"""Longest wait for a thread."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def default_threads() -> int:
    """Two at least, as one may hold a text of megabytes; four at most, the loop needs a core."""
    return min(4, max(2, (os.cpu_count() or 1) // 2))


class Beside:
    """Belongs to one event loop, from its first use on."""

    def __init__(self, threads: int | None = None, *, wait_seconds: float = WAIT_SECONDS) -> None:
        count = default_threads() if threads is None else threads
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="beside")
        self._turns = asyncio.Semaphore(count)
        self._wait_seconds = wait_seconds
        self.on_refused: Callable[[], None] = _untold
        """Called where no thread was free in time: for who counts refusals."""

    async def run(
        self,
        size: int,
        function: Callable[_Arguments, _Result],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Call ``function`` here, or in a thread when ``size`` says that it takes long.

        Raises RequestRefused (capacity) when no thread is free in time.
        """
        if size < IN_LOOP:
            return function(*args, **kwargs)
        await self._turn()
        try:
            work = self._threads.submit(function, *args, **kwargs)
        except BaseException:
            self._turns.release()
            raise
        loop = asyncio.get_running_loop()
        # Whoever waits may leave; the thread stays taken until its work is done.
        work.add_done_callback(lambda done: self._over(loop, done))
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """Begin nothing more. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self) -> None:
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._turns.acquire()
        except TimeoutError as error:
            self.on_refused()
            message = "the server is busy with large requests"
            raise RequestRefused(Refusal(code=RefusalCode.CAPACITY, message=message)) from error

    def _over(self, loop: asyncio.AbstractEventLoop, _: Future[_Result]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._turns.release)


def _untold() -> None:
    """Nobody counts."""


def weight(value: object, limit: int = IN_LOOP) -> int:
    """About how many characters and items a value has; looks at no more than ``limit``."""
    if isinstance(value, str | bytes):
        return len(value) + 1
    if isinstance(value, Mapping):
        parts: Sequence[object] = () if len(value) >= limit else [*value, *value.values()]
        total = len(value)
    elif isinstance(value, Sequence):
        total = len(value)
        parts = value
    else:
        return 1
    if isinstance(value, Sequence) and set(map(type, parts)) == {int}:  # in C: ids of a prompt
        return 2 * total
    for part in parts:
        if total >= limit:
            break
        total += weight(part, limit - total)
    return total
