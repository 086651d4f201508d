"""Wait policy of a CPU's threads, and their number in a step.

GNU OpenMP's threads spin for milliseconds at the end of every parallel region. If another process
requires the core (a prefill and a decode worker on one host, a router), a spinning thread delays
the one it waits for. Measured on two busy cores, a decode step took 600 ms instead of 80. Spinning
for a few microseconds, longer than the gap between two ops, costs an idle host nothing: 37 ms a
step, against 46 with the default and 45 without spinning. It is set before torch makes its thread
pool: by executors, and by entry points that import torch earlier.

A step runs on one thread if memory is the limit, on all if sums are. A step of few tokens reads
every weight once, and one core nearly reaches the memory's rate. More threads gain a tenth at best
and lose it again to waking and waiting. Measured on two cores with SmolLM2 in float32: 40 ms a step
by one thread, 45 by two that sleep between regions, 35 by two that spin and occupy both cores.
"""

from __future__ import annotations

import math
import os
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


WAIT_POLICY = "OMP_WAIT_POLICY"
SPIN_COUNT = "GOMP_SPINCOUNT"
_SPINS = "1000"
FEW_TOKENS = 4
"""Most tokens of a step that runs on one thread."""


def spin_briefly() -> None:
    """Bound the time that OpenMP's threads spin, unless the environment sets their wait policy."""
    if WAIT_POLICY not in os.environ:
        os.environ.setdefault(SPIN_COUNT, _SPINS)


class StepThreads:
    """Sets torch's threads before each step of a CPU worker; called in the thread of the steps."""

    def __init__(self, *, on_cpu: bool) -> None:
        """Read torch's current number of threads; other devices than CPUs keep it."""
        import torch  # not above: ``spin_briefly`` has to come before it

        self._all = torch.get_num_threads()
        self._set = torch.set_num_threads
        self._now = self._all
        self._fixed = not on_cpu or self._all == 1

    def set_for(self, num_tokens: int) -> None:
        """Use the number of threads that is fastest for a step of ``num_tokens``."""
        wanted = 1 if num_tokens <= FEW_TOKENS else self._all
        if not self._fixed and wanted != self._now:
            self._set(wanted)
            self._now = wanted
