"""Answers that take milliseconds to make, made a few times a second and shared by all requests.

A request gets an answer whose making began after the request came, shared with all others that wait
for the same one. The first requests are answered at once; under load answers are made every
``EVERY`` seconds. They are made in a thread, so that the loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

BURST = 20
"""Answers that are made at once after a pause."""
EVERY = 0.5
"""Seconds between two answers of one owner under load."""
MOST_OWNERS = 4_096
"""Owners whose pace is kept; the one with the oldest request is dropped first."""

Prepare = Callable[[], Callable[[], bytes]]
"""Callback that runs on the loop, where state changes; it returns one that runs in a thread."""


class SharedAnswers:
    """Answers by owner and name."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._paces: OrderedDict[str, _Pace] = OrderedDict()
        self._waiting: dict[tuple[str, str], list[asyncio.Future[bytes]]] = {}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def get(self, name: str, prepare: Prepare, *, owner: str = "") -> bytes:
        """Return the answer of this name. Answers of one owner share a pace: owners do not wait for
        each other. Raises the errors of making it."""
        loop, key = asyncio.get_running_loop(), (owner, name)
        future: asyncio.Future[bytes] = loop.create_future()
        self._waiting.setdefault(key, []).append(future)
        if key not in self._tasks:
            task = loop.create_task(self._answer_all(key, prepare), name=f"answer {name}")
            self._tasks[key] = task
        return await future

    def close(self) -> None:
        """Make no more."""
        for task in self._tasks.values():
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _answer_all(self, key: tuple[str, str], prepare: Prepare) -> None:
        """Make one answer after the other, until no request waits for one."""
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
            if not each.done():  # else its client has gone
                each.set_result(content)
                await asyncio.sleep(0)  # hundreds may wait: one in each round of the loop

    def _pace(self, owner: str) -> _Pace:
        throughput = self._paces.setdefault(owner, _Pace())
        self._paces.move_to_end(owner)
        while len(self._paces) > MOST_OWNERS:
            self._paces.popitem(last=False)
        return throughput


class _Pace:
    """Turns of one owner: ``BURST`` at once, then one ``EVERY`` so many seconds."""

    def __init__(self) -> None:
        self._full_at = 0.0
        """Time of the loop at which the whole burst is there again."""

    async def turn(self) -> None:
        """Wait for a turn."""
        now = asyncio.get_running_loop().time()
        self._full_at = max(self._full_at, now) + EVERY
        wait = self._full_at - now - BURST * EVERY
        if wait > 0:
            await asyncio.sleep(wait)
