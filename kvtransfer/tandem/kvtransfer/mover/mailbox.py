"""A queue that wakes a thread which sleeps on file descriptors: many writers, one reader."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """``put`` from any thread; ``wait`` and ``drain`` in the owner's."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._poller = select.poll()
        self._poller.register(self._read_fd, select.POLLIN)
        self._closed = False
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Readable while something may be in the box."""
        return self._read_fd

    def put(self, item: Item) -> None:
        """Add and wake; after ``close`` the item is dropped."""
        if not self._closed:
            self._items.append(item)
            self.wake()

    def wake(self) -> None:
        """End the reader's wait."""
        with self._lock, contextlib.suppress(BlockingIOError):  # full: it is awake anyway
            if not self._closed:
                os.write(self._write_fd, b"\0")

    def wait(self, seconds: float | None, others: Sequence[int] = ()) -> None:
        """Sleep until there is something here or on another descriptor, or the time is over."""
        if not self._items:
            self._sleep(seconds, others)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read_fd, 4096):
                pass

    def _sleep(self, seconds: float | None, others: Sequence[int]) -> None:
        """By poll, which takes any descriptor (select none above 1023) and counts milliseconds: a
        shorter nap is slept through."""
        for descriptor in others:
            self._poller.register(descriptor, select.POLLIN)
        try:
            if seconds is None or seconds >= 0.001:
                self._poller.poll(None if seconds is None else seconds * 1000)
            elif not self._poller.poll(0):
                time.sleep(seconds)
        finally:
            for descriptor in others:
                self._poller.unregister(descriptor)

    def drain(self) -> list[Item]:
        """Everything that is in the box now."""
        items = []
        with contextlib.suppress(IndexError):
            while True:
                items.append(self._items.popleft())
        return items

    def close(self) -> None:
        """Let go of the descriptors; the owner calls it when its loop has ended."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._read_fd)
                os.close(self._write_fd)
