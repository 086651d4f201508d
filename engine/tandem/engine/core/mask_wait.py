"""How long a step's draws wait for masks that are not made yet: no longer than costs nobody."""

from __future__ import annotations

import time

MOST_S = 0.02
"""Since the update before, on a device that computes meanwhile."""
LEAST_S = 0.001
"""From now: most masks take a tenth of that."""


class MaskWait:
    """Told of every update. By the clock that threads wait by."""

    def __init__(self, *, overlaps: bool) -> None:
        """``overlaps``: the device computes a step while the step loop waits."""
        self._overlaps = overlaps
        self._at = 0.0
        self._step_s = 0.0

    def note(self, seconds: float) -> None:
        """A step's result was taken in; it had taken so long."""
        if self._overlaps:
            self._at, self._step_s = time.monotonic(), seconds

    def until(self) -> float:
        """When to go on without what is late: a third of a step after the update before, so that
        its draws and the next step are there when its forward ends."""
        now = time.monotonic()
        return max(self._at + min(self._step_s / 3, MOST_S), now + LEAST_S)
