"""Writes are allowed only while this replica surely holds the Lease.

A late write would undo another leader's. The Lease is released when no write is in progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.protocol.errors import TandemError


class FencedOff(TandemError):
    """The Lease may belong to another replica: nothing is written."""


class Fence:
    """Closed until ``open_until``, and after ``close``. Thread-safe."""

    def __init__(self) -> None:
        self._until = float("-inf")
        self._writing = 0
        self._closed = False
        self._changed = threading.Condition()

    def open_until(self, moment: float) -> None:
        """Allow writes until ``moment`` of the monotonic clock."""
        with self._changed:
            self._until = moment

    @contextmanager
    def writing(self) -> Iterator[float]:
        """Keep the Lease during a write; yield its maximum seconds. Raises FencedOff."""
        with self._changed:
            left = self._until - time.monotonic()
            if self._closed or left <= 0:
                raise FencedOff("this replica is no longer the leader: writes are disabled")
            self._writing += 1
        try:
            yield left
        finally:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    def close(self, seconds: float) -> bool:
        """Refuse further writes, and wait for current ones; return whether all have ended."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: self._writing == 0, seconds)
