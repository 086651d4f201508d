"""How a thread waits that must not be late by much: naps, and how long a step loop stays awake.

A nap is a short sleep. Unlike a loop that asks without a pause it lets the process's other threads
run, and its core stays out of deep sleep, from which it would come back slowly: a thread that
sleeps takes 50 us to wake on an H200 machine, and finds its core cold, so that Python runs at a
fraction of its speed for the first milliseconds. So an idle step loop polls, between naps, for a
bounded time, as a hypervisor does for a halted processor (adaptive halt polling), and only where
the next work has come soon before; or around the moment at which it is expected.
"""

from __future__ import annotations

import math
import time

NAP_SECONDS = 2e-5
AHEAD_SECONDS = 1e-3
"""How long before an expected moment a step loop wakes: so long a cold core takes to be quick."""
LATE_SECONDS = 1e-3
"""How long behind that moment it stays awake."""


def nap() -> None:
    """Sleep for a moment."""
    time.sleep(NAP_SECONDS)


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

    def expecting(self, moment: float, most: float) -> tuple[float, float]:
        """How many seconds to wait, ``most`` at most, for what is expected at a moment (of
        ``time.monotonic``; inf is unknown), and until when to poll meanwhile: it sleeps until
        shortly before, and polls until shortly behind."""
        if not self._seconds or moment == math.inf:
            return most, 0.0
        asleep = moment - AHEAD_SECONDS - time.monotonic()
        if asleep > 0:
            return min(most, asleep), 0.0
        return most, moment + LATE_SECONDS

    def end(self) -> None:
        """Work came."""
        if self._idle_since is not None:
            self._worth_it = time.monotonic() - self._idle_since < self._seconds
            self._idle_since = None
