"""How a CPU's threads wait for each other, and how many of them a step uses.

GNU OpenMP's threads spin for milliseconds at the end of every parallel region. Where another
process wants the core (a prefill and a decode worker on one host, a router) a spinning thread keeps
the one it waits for from running: measured on two busy cores, a decode step took 600 ms instead of
80. Spinning for a few microseconds only, longer than the gap between two ops, costs an idle host
nothing: 37 ms a step, against 46 with the default and 45 with no spinning at all. Said before torch
brings its thread pool: by executors, and by entry points that import torch earlier.

One thread does a step where memory is the limit, all where sums are. A step of few tokens reads
every weight once, and one core nearly reaches the memory's rate. More threads then gain a tenth at
best and lose it again to waking and waiting (measured on two cores with SmolLM2 in float32: 40 ms a
step by one thread, 45 by two that sleep between regions, 35 by two that spin and so take the second
core from everybody else).
"""

from __future__ import annotations

import os

WAIT_POLICY = "OMP_WAIT_POLICY"
SPIN_COUNT = "GOMP_SPINCOUNT"
_SPINS = "1000"
FEW_TOKENS = 4
"""At most so many are a step for one thread."""


def spin_briefly() -> None:
    """Bound how long OpenMP's threads spin, unless the environment says how they wait."""
    if WAIT_POLICY not in os.environ:
        os.environ.setdefault(SPIN_COUNT, _SPINS)


class StepThreads:
    """Sets torch's threads before each step of a CPU worker; called in the thread of the steps."""

    def __init__(self, *, on_cpu: bool) -> None:
        """All threads are those that torch has now; another device needs none of this."""
        import torch  # not above: ``spin_briefly`` has to come before it

        self._all = torch.get_num_threads()
        self._set = torch.set_num_threads
        self._now = self._all
        self._fixed = not on_cpu or self._all == 1

    def set_for(self, num_tokens: int) -> None:
        """Use as many threads as a step of ``num_tokens`` gains from."""
        wanted = 1 if num_tokens <= FEW_TOKENS else self._all
        if not self._fixed and wanted != self._now:
            self._set(wanted)
            self._now = wanted
