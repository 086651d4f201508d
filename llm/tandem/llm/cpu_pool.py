"""Threads for work that would block the event loop: tokenizing, templates, parsing.

They are shared fairly between tenants, by the size of work. Small work runs in the loop; large work
uses half of the threads. Long waits end in a refusal.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from tandem.base.fair_order import FairOrder
from tandem.protocol.errors import Refusal, RefusalCode, RequestRefused

IN_LOOP = 8_000
"""Characters or items from which work runs in a thread."""
LARGE = 100_000
"""Characters or items from which work is large: it uses at most half of the threads."""
WAIT_SECONDS = 20.0
"""Maximum wait for a thread."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def default_threads() -> int:
    """Return the number of threads: 2 to 4, as the loop requires a core."""
    return min(4, max(2, (os.cpu_count() or 1) // 2))


def _one_tenant() -> str:
    return ""


@dataclass(eq=False, slots=True)
class _Work:
    start: int
    is_large: bool
    """Whether it is large: it uses at most half of the threads."""
    turn: asyncio.Future[None]


class CpuPool:
    """Executor that belongs to one event loop, from its first use on."""

    def __init__(
        self,
        threads: int | None = None,
        *,
        wait_seconds: float = WAIT_SECONDS,
        tenant: Callable[[], str] = _one_tenant,
    ) -> None:
        """``tenant`` returns the tenant of the current task; "" for one queue."""
        count = default_threads() if threads is None else threads
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="beside")
        self._num_free = count
        self._num_free_for_large = max(1, count // 2)
        self._order = FairOrder()
        self._queues: dict[str, deque[_Work]] = {}
        """Waiting work by tenant; no queue is empty."""
        self._tenant = tenant
        self._wait_seconds = wait_seconds
        self.on_refused: Callable[[], None] = _ignore
        """Called when a request is refused."""

    async def run(
        self,
        size: int,
        function: Callable[_Arguments, _Result],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Call ``function`` here, or in a thread if ``size`` is large.

        Raises RequestRefused (capacity) if no thread is free in time.
        """
        if size < IN_LOOP:
            return function(*args, **kwargs)
        tenant = self._tenant()
        is_large = bool(tenant) and size >= LARGE
        await self._turn(tenant, size, is_large=is_large)
        try:
            work = self._threads.submit(function, *args, **kwargs)
        except BaseException:
            self._release(is_large=is_large)
            raise
        loop = asyncio.get_running_loop()
        # The thread is taken until its work is done, even if the caller leaves.
        work.add_done_callback(lambda done: self._over(loop, done, is_large=is_large))
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """Start no more work. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, tenant: str, size: int, *, is_large: bool) -> None:
        turn = asyncio.get_running_loop().create_future()
        work = _Work(self._order.enter(tenant, size), is_large, turn)
        queue = self._queues.setdefault(tenant, deque())
        queue.append(work)
        self._begin_next()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except BaseException as error:
            self._withdraw(tenant, work)
            if not isinstance(error, TimeoutError):
                raise
            self.on_refused()
            message = (
                f"the server is busy with large requests: no thread was free for this one within "
                f"{self._wait_seconds:g} s"
            )
            raise RequestRefused(Refusal(code=RefusalCode.CAPACITY, message=message)) from error

    def _withdraw(self, tenant: str, work: _Work) -> None:
        """Remove work from its queue, or return its thread."""
        queue = self._queues.get(tenant)
        if queue is not None and work in queue:
            queue.remove(work)
            if not queue:
                del self._queues[tenant]
            self._begin_next()  # it may have delayed others of its tenant
        elif work.turn.done() and not work.turn.cancelled():
            self._release(is_large=work.is_large)

    def _begin_next(self) -> None:
        while self._num_free:
            first = min(
                (
                    (queue[0].start, tenant)
                    for tenant, queue in self._queues.items()
                    if self._num_free_for_large or not queue[0].is_large
                ),
                default=None,
            )
            if first is None:
                return
            queue = self._queues[first[1]]
            work = queue.popleft()
            if not queue:
                del self._queues[first[1]]
            if work.turn.done():
                continue  # cancelled at this moment
            self._order.begin(work.start)
            self._num_free -= 1
            self._num_free_for_large -= work.is_large
            work.turn.set_result(None)

    def _release(self, *, is_large: bool) -> None:
        self._num_free += 1
        self._num_free_for_large += is_large
        self._begin_next()

    def _over(self, loop: asyncio.AbstractEventLoop, _: Future[_Result], *, is_large: bool) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: self._release(is_large=is_large))


def _ignore() -> None:
    """Do nothing."""


def weight(value: object, limit: int = IN_LOOP) -> int:
    """Return the approximate characters and items of a value, up to about ``limit``."""
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
    if isinstance(value, Sequence) and set(map(type, parts)) == {int}:  # fast path: ids of a prompt
        return 2 * total
    for part in parts:
        if total >= limit:
            break
        total += weight(part, limit - total)
    return total
