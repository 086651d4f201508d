"""A queue whose reader sleeps on file descriptors: any thread puts, one takes.

The reader may wait for sockets at the same time. While it works, its descriptor is not written, so
that a put costs no system call then.
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
"""A nap that is shorter is measured in microseconds."""
MOST_ITEMS = 100_000
"""Most items that ``offer`` queues, so that peers never fill the memory: above it links end."""


class WakeQueue(Generic[Item]):
    """Writers ``put``, ``offer``, ``add`` and ``wake``; the rest is the reader's.

    Writers never block, and may be signal handlers.
    """

    def __init__(self, limit: int = MOST_ITEMS) -> None:
        """Make an empty queue. ``limit``: items beyond which ``offer`` returns False."""
        self._items: deque[Item] = deque()
        self._limit = limit
        self._listening = False
        self._closed = True
        self._lock = threading.RLock()
        """Lock of the descriptors' lifetimes; a signal handler may have interrupted its holder."""
        if sys.platform == "linux":
            # A pipe's reader would wake behind its writer, on the same processor.
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
        """Add an item and wake the listening reader; after ``close`` it is dropped."""
        self.add(item)
        # After the item is there: who does not listen yet looks for items before it sleeps.
        if self._listening:
            self.wake()

    def offer(self, item: Item) -> bool:
        """``put`` the item, or return False if the limit is reached."""
        if len(self._items) >= self._limit:
            return False
        self.put(item)
        return True

    def add(self, item: Item) -> None:
        """Add an item without waking the reader."""
        if not self._closed:
            self._items.append(item)

    def wake(self) -> None:
        """Make the descriptor readable, even if the reader does not listen."""
        with self._lock, contextlib.suppress(BlockingIOError):  # full: it is readable anyway
            if not self._closed:
                os.write(self._rope, _ONCE)

    @property
    def empty(self) -> bool:
        """Return whether there is no item to take."""
        return not self._items

    def take(self) -> list[Item]:
        """Take all items, the oldest first."""
        items: list[Item] = []
        while self._items:  # nobody else takes
            items.append(self._items.popleft())
        return items

    def hush(self) -> None:
        """Make the descriptor unreadable until the next wake."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._bell, 4096)) == 4096:
                pass

    def listening(self) -> _Listening:
        """Within the block every ``put`` makes the returned descriptor readable. An earlier ``put``
        does not: check whether the queue is ``empty`` before you sleep."""
        return _Listening(self)

    def wait(self, seconds: float | None, others: Sequence[int] = ()) -> None:
        """Sleep until an item comes, another descriptor is readable, or the time is over."""
        with self.listening():
            if not self._items:
                self._sleep(seconds, others)

    def _sleep(self, seconds: float | None, others: Sequence[int]) -> None:
        """Sleep by poll, which takes any descriptor (select none above 1023) and milliseconds. Naps
        of a few milliseconds are measured more precisely."""
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
        """Close the descriptors, and drop items that are put from now on. For the reader, when its
        loop has ended. May be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for descriptor in {self._bell, self._rope}:
                    os.close(descriptor)


class _Listening:
    """Context in which the reader sleeps on the queue; a generator would be slower to leave."""

    __slots__ = ("_queue",)

    def __init__(self, queue: WakeQueue[Any]) -> None:
        self._queue = queue

    def __enter__(self) -> int:
        self._queue._listening = True
        return self._queue._bell

    def __exit__(self, *_: object) -> None:
        self._queue._listening = False
        self._queue.hush()
