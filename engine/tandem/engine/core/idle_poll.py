"""How long an idle step loop stays awake: only where the next work has come soon before.

A thread that sleeps takes 50 us to wake on an H200 machine, and finds its core cold: Python runs at
a fraction of its speed for the first milliseconds. So the loop polls, between naps, for a bounded
time, as a hypervisor does for a halted processor (adaptive halt polling), and only while it is
worth it.
"""

from __future__ import annotations

import time


class IdlePoll:
    """Used by the step loop alone: ``begin`` when it has nothing to do, ``end`` when it has."""

    def __init__(self, seconds: float) -> None:
        """``seconds`` to stay awake at most; 0 never does."""
        self._seconds = seconds
        self._idle_since: float | None = None
        self._worth_it = False
        """Whether the last work came within that time."""

    def begin(self) -> float:
        """Until when (of ``time.monotonic``) to poll; called again while still idle, it counts from
        the first call."""
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        return self._idle_since + (self._seconds if self._worth_it else 0.0)

    def end(self) -> None:
        """Work came."""
        if self._idle_since is not None:
            self._worth_it = time.monotonic() - self._idle_since < self._seconds
            self._idle_since = None
