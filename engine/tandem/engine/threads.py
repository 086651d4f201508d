"""Wait policy of a CPU's threads, and their number in a step.

GNU OpenMP's threads spin after every parallel region and delay processes that need the core. A
bound of microseconds, longer than the gap between two ops, avoids that. It must be set before torch
makes its threads.

A step of few tokens is bound by memory, which one core nearly saturates; it runs on one thread,
other steps on all.
"""

from __future__ import annotations

import math
import os
import time

NAP_SECONDS = 2e-5
AHEAD_SECONDS = 1e-3
"""Seconds before an expected event at which the step loop wakes."""
LATE_SECONDS = 1e-3
"""Seconds after that event until which the step loop stays awake."""


def nap() -> None:
    """Sleep for ``NAP_SECONDS``."""
    time.sleep(NAP_SECONDS)


class IdlePoll:
    """Polling of the step loop: ``begin`` when idle, ``end`` at work."""

    def __init__(self, seconds: float) -> None:
        """``seconds`` to stay awake at most; 0: never."""
        self._seconds = seconds
        self._idle_since: float | None = None
        self._worth_it = False
        """Whether the last work came within that time."""

    def begin(self) -> float:
        """Return the time (``time.monotonic``) until which to poll, counted from the first call
        while idle."""
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        return self._idle_since + (self._seconds if self._worth_it else 0.0)

    def expecting(self, moment: float, most: float) -> tuple[float, float]:
        """Return the seconds to wait for ``moment`` (at most ``most``), and the time until which to
        poll. Times are of ``time.monotonic``; inf is unknown."""
        if not self._seconds or moment == math.inf:
            return most, 0.0
        asleep = moment - AHEAD_SECONDS - time.monotonic()
        if asleep > 0:
            return min(most, asleep), 0.0
        return most, moment + LATE_SECONDS

    def end(self) -> None:
        if self._idle_since is not None:
            self._worth_it = time.monotonic() - self._idle_since < self._seconds
            self._idle_since = None


WAIT_POLICY = "OMP_WAIT_POLICY"
SPIN_COUNT = "GOMP_SPINCOUNT"
_SPINS = "1000"
FEW_TOKENS = 4
"""Maximum tokens of a step that runs on one thread."""


def spin_briefly() -> None:
    """Bound the time that OpenMP's threads spin, unless the environment sets their wait policy."""
    if WAIT_POLICY not in os.environ:
        os.environ.setdefault(SPIN_COUNT, _SPINS)


class StepThreads:
    """Sets torch's threads before each step of a CPU worker, in the thread of the steps."""

    def __init__(self, *, on_cpu: bool) -> None:
        """Read torch's current number of threads, which other devices than CPUs keep."""
        import torch  # after ``spin_briefly``

        self._all = torch.get_num_threads()
        self._set = torch.set_num_threads
        self._now = self._all
        self._fixed = not on_cpu or self._all == 1

    def set_for(self, num_tokens: int) -> None:
        wanted = 1 if num_tokens <= FEW_TOKENS else self._all
        if not self._fixed and wanted != self._now:
            self._set(wanted)
            self._now = wanted
