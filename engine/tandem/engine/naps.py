"""Short waits that must not end late: naps, and the polling time of an idle step loop.

A nap is a short sleep. Unlike a loop without a pause it lets the process's other threads run, and
its core stays out of deep sleep. A sleeping thread takes 50 us to wake on an H200 machine. It finds
its core cold, so that Python runs at a fraction of its speed for the first milliseconds. An idle
step loop therefore polls between naps for a bounded time, as a hypervisor does for a halted
processor (adaptive halt polling). It polls only if the last work came soon, or around the moment at
which work is expected.
"""

from __future__ import annotations

import math
import time

NAP_SECONDS = 2e-5
AHEAD_SECONDS = 1e-3
"""Seconds before an expected moment at which a step loop wakes: a cold core needs them."""
LATE_SECONDS = 1e-3
"""Seconds after that moment until which the step loop stays awake."""


def nap() -> None:
    """Sleep for ``NAP_SECONDS``."""
    time.sleep(NAP_SECONDS)


class IdlePoll:
    """Polling of the step loop, its only user: ``begin`` when idle, ``end`` at work."""

    def __init__(self, seconds: float) -> None:
        """``seconds`` to stay awake at most; 0: never."""
        self._seconds = seconds
        self._idle_since: float | None = None
        self._worth_it = False
        """True if the last work came within that time."""

    def begin(self) -> float:
        """Return the time (of ``time.monotonic``) until which to poll. Repeated calls while idle
        count from the first one."""
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        return self._idle_since + (self._seconds if self._worth_it else 0.0)

    def expecting(self, moment: float, most: float) -> tuple[float, float]:
        """Return the seconds to wait, ``most`` at most, for an expected moment, and the time until
        which to poll. Both times are of ``time.monotonic``; inf is unknown. The loop sleeps until
        shortly before the moment, and polls until shortly after."""
        if not self._seconds or moment == math.inf:
            return most, 0.0
        asleep = moment - AHEAD_SECONDS - time.monotonic()
        if asleep > 0:
            return min(most, asleep), 0.0
        return most, moment + LATE_SECONDS

    def end(self) -> None:
        """Note that work came."""
        if self._idle_since is not None:
            self._worth_it = time.monotonic() - self._idle_since < self._seconds
            self._idle_since = None
