"""Thread that notices when the whole process stood still: stopped, starved or frozen.

It measures its own sleeps, only while a request is watched.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from tandem.protocol.timeline import Note

TICK_SECONDS = 0.04
"""Largest error of a stop's recorded times."""
STILL_SECONDS = 0.15
"""Shortest stop that counts, above a busy machine's delays."""
LINGER_SECONDS = 2.0
"""Seconds for which it runs after the last ``watch``."""
MAX_STOPS = 32


class StallWatchdog(threading.Thread):
    """Watchdog; call ``watch`` while a request is watched."""

    def __init__(self) -> None:
        super().__init__(name="tandem-stillness", daemon=True)
        self._stops: deque[Note] = deque(maxlen=MAX_STOPS)
        self._watching = threading.Event()
        self._until = 0.0
        self._asleep_since = 0.0
        self._over = False

    def watch(self) -> None:
        """Watch for stops; call it about twice a second while a request is watched."""
        now = time.monotonic()
        self._until = now + LINGER_SECONDS
        if not self._watching.is_set():
            self._asleep_since = now  # a stop before the thread wakes counts, too
            self._watching.set()

    def stop(self) -> None:
        self._over = True
        self._watching.set()

    def stops(self) -> tuple[Note, ...]:
        """Return the last stops on the monotonic clock, including one that has just ended."""
        now, since = time.monotonic(), self._asleep_since
        if since and now - since - TICK_SECONDS >= STILL_SECONDS:
            return (*self._stops, Note("stopped", since, now, 1))
        return tuple(self._stops)

    def run(self) -> None:
        while not self._over:
            self._watching.wait()
            since = self._asleep_since or time.monotonic()
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            if now - since - TICK_SECONDS >= STILL_SECONDS:
                self._stops.append(Note("stopped", since, now, 1))
            self._asleep_since = now  # the next tick begins where this one ends
            if now > self._until:
                self._watching.clear()
                self._asleep_since = 0.0
                if self._until > now:  # ``watch`` was called meanwhile
                    self._asleep_since = now
                    self._watching.set()
