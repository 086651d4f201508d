"""Answers that take milliseconds to make, shared by all requests that wait for them.

The first are made at once, under load one every ``EVERY`` seconds, in a thread. An answer's making
begins after the request came.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

BURST = 20
"""Answers that are made at once after a pause."""
EVERY = 0.5
MOST_OWNERS = 4_096
"""Maximum owners whose pace is kept, by the latest request."""

Prepare = Callable[[], Callable[[], bytes]]
"""Callback for the loop; it returns one for a thread."""


class SharedAnswers:
    """Answers by owner and name."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._paces: OrderedDict[str, _Pace] = OrderedDict()
        self._waiting: dict[tuple[str, str], list[asyncio.Future[bytes]]] = {}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def get(self, name: str, prepare: Prepare, *, owner: str = "") -> bytes:
        """Return the answer of this name. Each owner has its own pace. Raises its errors."""
        loop, key = asyncio.get_running_loop(), (owner, name)
        future: asyncio.Future[bytes] = loop.create_future()
        self._waiting.setdefault(key, []).append(future)
        if key not in self._tasks:
            task = loop.create_task(self._answer_all(key, prepare), name=f"answer {name}")
            self._tasks[key] = task
        return await future

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _answer_all(self, key: tuple[str, str], prepare: Prepare) -> None:
        """Make answers until no request waits for one."""
        try:
            while key in self._waiting:
                await self._pace(key[0]).turn()
                await self._answer(self._waiting.pop(key), prepare)
        finally:
            del self._tasks[key]

    async def _answer(self, waiting: list[asyncio.Future[bytes]], prepare: Prepare) -> None:
        try:
            make = prepare()
            content = await asyncio.get_running_loop().run_in_executor(self._threads, make)
        except Exception as error:
            for each in waiting:
                if not each.done():
                    each.set_exception(error)
            return
        for each in waiting:
            if not each.done():  # else its client has left
                each.set_result(content)
                await asyncio.sleep(0)  # one in each round of the loop

    def _pace(self, owner: str) -> _Pace:
        throughput = self._paces.setdefault(owner, _Pace())
        self._paces.move_to_end(owner)
        while len(self._paces) > MOST_OWNERS:
            self._paces.popitem(last=False)
        return throughput


class _Pace:
    """Turns of one owner: ``BURST`` at once, then one every ``EVERY`` seconds."""

    def __init__(self) -> None:
        self._full_at = 0.0
        """Time at which the whole burst is available again."""

    async def turn(self) -> None:
        now = asyncio.get_running_loop().time()
        self._full_at = max(self._full_at, now) + EVERY
        wait = self._full_at - now - BURST * EVERY
        if wait > 0:
            await asyncio.sleep(wait)
