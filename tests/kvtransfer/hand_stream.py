"""A device's queue that is worked off when a test says so."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext


class HandStream:
    """What is queued is carried out at once, and said to be done while ``hold`` is not set."""

    def __init__(self) -> None:
        self.hold = threading.Event()
        self.waits = 0
        """How often somebody waited for all of it."""

    def queue(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> _Mark:
        return _Mark(self.hold)

    def wait(self, seconds: float | None = None) -> bool:
        """See Stream; who says for how long is told how it stands."""
        self.waits += 1
        return seconds is None or not self.hold.is_set()


class _Mark:
    def __init__(self, hold: threading.Event) -> None:
        self._hold = hold

    def done(self) -> bool:
        return not self._hold.is_set()
