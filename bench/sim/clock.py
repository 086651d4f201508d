"""The clock of a simulation: what happens, in the order of its time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Event = Callable[[], None]


class Clock:
    """Events by time; equal times in the order in which they were asked for, so that a run is the
    same whenever it is repeated."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the run's start."""
        self._heap: list[tuple[float, int, Event]] = []
        self._count = 0

    def at(self, when: float, event: Event) -> None:
        """Call ``event`` at ``when``, or now if that has passed."""
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, event))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            self.now, _, event = heapq.heappop(self._heap)
            event()
