"""Which writes may still begin: none of a replica that may have lost the Lease.

A write that is on its way when another replica begins to lead would undo what that one does. So a
write begins only while the Lease surely holds and may take no longer than that, and the Lease is
given back only when none is on its way. Moved on by ``loop.leader``; asked by ``client``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.protocol.errors import TandemError


class FencedOff(TandemError):
    """The Lease may be another's by now: nothing is written."""


class Fence:
    """Closed until ``open_until`` is called, and for good after ``close``. Thread-safe."""

    def __init__(self) -> None:
        self._until = float("-inf")
        self._writing = 0
        self._closed = False
        self._changed = threading.Condition()

    def open_until(self, moment: float) -> None:
        """Let writes go on until ``moment`` by the monotonic clock."""
        with self._changed:
            self._until = moment

    @contextmanager
    def writing(self) -> Iterator[float]:
        """Hold the Lease back while writing; yields the seconds that the write may take.

        Raises FencedOff when none may begin.
        """
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
        """Let no further write begin, and wait for those on their way; whether all have ended."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: self._writing == 0, seconds)
