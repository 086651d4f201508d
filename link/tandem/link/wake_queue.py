"""A queue whose reader sleeps on file descriptors: any thread puts, one takes.

The reader may wait for sockets at the same time. While it works, a put costs no system call.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from tandem.link.naps import sleep_on

Item = TypeVar("Item")

_ONCE = (1).to_bytes(8, sys.byteorder)
SHORT_SECONDS = 0.02
"""Sleeps below this are measured in microseconds."""
MOST_ITEMS = 100_000
"""Maximum items that ``offer`` queues."""


class WakeQueue(Generic[Item]):
    """Queue with one reader. Writers never block, and may be signal handlers."""

    def __init__(self, limit: int = MOST_ITEMS) -> None:
        """``limit``: items beyond which ``offer`` returns False."""
        self._items: deque[Item] = deque()
        self._limit = limit
        self._listening = False
        self._closed = True
        self._lock = threading.RLock()
        """Lock of the descriptors' lifetimes, reentrant for signal handlers."""
        if sys.platform == "linux":
            # A pipe's reader would wake after its writer, on the same processor.
            self._bell = self._rope = os.eventfd(0)
        else:
            self._bell, self._rope = os.pipe()
        for descriptor in {self._bell, self._rope}:
            os.set_blocking(descriptor, False)
        self._closed = False
        self._poller = select.poll()
        self._poller.register(self._bell, select.POLLIN)

    def __del__(self) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the descriptor: readable after ``wake``, or a ``put`` to a listening reader."""
        return self._bell

    def put(self, item: Item) -> None:
        """Add an item and wake the sleeping reader; after ``close`` it is dropped."""
        self.add(item)
        # After the append: a reader that does not listen yet looks for items before it sleeps.
        if self._listening:
            self.wake()

    def offer(self, item: Item) -> bool:
        """``put`` the item, or return False if the limit is reached."""
        if len(self._items) >= self._limit:
            return False
        self.put(item)
        return True

    def add(self, item: Item) -> None:
        if not self._closed:
            self._items.append(item)

    def wake(self) -> None:
        """Make the descriptor readable, even if the reader does not listen."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.write(self._rope, _ONCE)

    @property
    def empty(self) -> bool:
        return not self._items

    def take(self) -> list[Item]:
        """Take all items, the oldest first."""
        items: list[Item] = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def hush(self) -> None:
        """Make the descriptor unreadable until the next wake."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._bell, 4096)) == 4096:
                pass

    def listening(self) -> _Listening:
        """Make every ``put`` within the block set the returned descriptor readable.

        Check ``empty`` before you sleep.
        """
        return _Listening(self)

    def wait(self, seconds: float | None, others: Sequence[int] = ()) -> None:
        """Sleep until an item comes, another descriptor is readable, or the time is over."""
        with self.listening():
            if not self._items:
                self._sleep(seconds, others)

    def _sleep(self, seconds: float | None, others: Sequence[int]) -> None:
        """Sleep by poll; select takes no descriptor above 1023. Short sleeps are more precise."""
        if seconds is not None and seconds < SHORT_SECONDS:
            sleep_on((self._bell, *others), seconds)
            return
        for descriptor in others:
            self._poller.register(descriptor, select.POLLIN)
        try:
            self._poller.poll(None if seconds is None else seconds * 1000)
        finally:
            for descriptor in others:
                self._poller.unregister(descriptor)

    def close(self) -> None:
        """Close the descriptors. Items put from now on are dropped. May be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for descriptor in {self._bell, self._rope}:
                    os.close(descriptor)


class _Listening:
    """Context in which the reader sleeps on the queue; faster than a generator."""

    __slots__ = ("_queue",)

    def __init__(self, queue: WakeQueue[Any]) -> None:
        self._queue = queue

    def __enter__(self) -> int:
        self._queue._listening = True
        return self._queue._bell

    def __exit__(self, *_: object) -> None:
        self._queue._listening = False
        self._queue.hush()
