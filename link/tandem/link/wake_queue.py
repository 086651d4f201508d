"""A queue whose reader sleeps on file descriptors: any thread puts, one takes.

The reader may wait for sockets at the same time. While it is at work nothing is written to its
descriptor, so that a put costs no system call then.
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
"""What strangers have sent never fills the memory: beyond this their links end."""


class WakeQueue(Generic[Item]):
    """Writers ``put``, ``offer``, ``add`` and ``wake``; the rest is the reader's.

    Writers never block, and may be signal handlers.
    """

    def __init__(self, limit: int = MOST_ITEMS) -> None:
        """``limit``: items beyond which ``offer`` says no."""
        self._items: deque[Item] = deque()
        self._limit = limit
        self._listening = False
        self._closed = True
        self._lock = threading.RLock()
        """Of the descriptors' lives; a signal handler may have interrupted its holder."""
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
        """Readable after ``wake``, and after ``put`` while the reader listens."""
        return self._bell

    def put(self, item: Item) -> None:
        """Add an item and wake who listens; after ``close`` it is dropped."""
        self.add(item)
        # After the item is there: who does not listen yet looks for items before it sleeps.
        if self._listening:
            self.wake()

    def offer(self, item: Item) -> bool:
        """``put``, or False where as many wait as may."""
        if len(self._items) >= self._limit:
            return False
        self.put(item)
        return True

    def add(self, item: Item) -> None:
        """Add an item for whenever the reader next looks."""
        if not self._closed:
            self._items.append(item)

    def wake(self) -> None:
        """Make the descriptor readable, whoever listens."""
        with self._lock, contextlib.suppress(BlockingIOError):  # full: it is readable anyway
            if not self._closed:
                os.write(self._rope, _ONCE)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._items

    def take(self) -> list[Item]:
        """All that has come, the oldest first."""
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
        """Within the block every ``put`` makes the descriptor that this gives readable. What was
        put before does not: look whether the queue is ``empty`` before you sleep."""
        return _Listening(self)

    def wait(self, seconds: float | None, others: Sequence[int] = ()) -> None:
        """Sleep until there is something here or on another descriptor, or the time is over."""
        with self.listening():
            if not self._items:
                self._sleep(seconds, others)

    def _sleep(self, seconds: float | None, others: Sequence[int]) -> None:
        """By poll, which takes any descriptor (select none above 1023) and counts milliseconds;
        naps of a few are measured more precisely."""
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
        """Drop what is put from now on and let go of the descriptors; for the reader, when its loop
        has ended. May be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for descriptor in {self._bell, self._rope}:
                    os.close(descriptor)


class _Listening:
    """The reader is about to sleep on the queue; a generator would be slower to leave."""

    __slots__ = ("_queue",)

    def __init__(self, queue: WakeQueue[Any]) -> None:
        self._queue = queue

    def __enter__(self) -> int:
        self._queue._listening = True
        return self._queue._bell

    def __exit__(self, *_: object) -> None:
        self._queue._listening = False
        self._queue.hush()
