"""The time that a step's draws wait for late masks: no longer than delays no result.

The device computes the step meanwhile. The time that the step loop waited for masks and then for
the result was spare. The next step's draws may wait as long, less a margin.
"""

from __future__ import annotations

import time
from collections import deque

LEAST_S = 0.001
"""Most masks take a tenth of that."""
MOST_S = 0.02
MARGIN_S = 0.0005
"""Kept back, for steps that are not alike. Without anything left over the wait shrinks by it."""
STEPS = 4
"""The least of so many counts: a short step may follow a long one."""


class MaskWait:
    """Deadline of the step loop's waits for masks, from its past waits. Uses threads' clock."""

    def __init__(self, *, overlaps: bool) -> None:
        """``overlaps``: the device computes a step while the step loop waits."""
        self._overlaps = overlaps
        self._begun = 0.0
        self._until = 0.0
        self._waited = 0.0
        self._room: deque[float] = deque(maxlen=STEPS)

    def until(self) -> float:
        """Return the deadline for late masks; the wait begins now."""
        room = min(self._room, default=0.0)
        self._begun = time.monotonic()
        self._until = self._begun + min(max(room, LEAST_S), MOST_S)
        return self._until

    def over(self) -> None:
        """End the wait: the masks are there, or late. Time past the deadline is not spare."""
        self._waited = min(time.monotonic(), self._until) - self._begun

    def updated(self, idle: float) -> None:
        """Note that the wait for a result took ``idle`` seconds."""
        if self._overlaps:
            self._room.append(self._waited + idle - MARGIN_S)
        self._waited = 0.0
