"""Waiting time of a request for a worker that could take it. Pure: the caller has the clock.

It waits because a lost worker may return or have a successor. Meanwhile full or sleeping workers
may become available: they are asked again, after growing pauses.
"""

from __future__ import annotations

import math

FIRST_PAUSE = 1.0
"""Seconds until they are asked again for the first time; each pause is twice the last."""


class Patience:
    """Wait of one request, from when no worker is left until one has worked for it."""

    __slots__ = ("_ask_at", "_pause", "ends")

    def __init__(self) -> None:
        self.over()

    def over(self) -> None:
        """Reset after a worker has worked for the request: a later wait is a new one."""
        self.ends = math.inf
        """Time at which the request fails without a worker."""
        self._ask_at = math.inf
        self._pause = FIRST_PAUSE

    def begin(self, now: float, seconds: float) -> None:
        """Begin a wait without workers. Repeated refusals do not make it longer."""
        if self.ends == math.inf:
            self.ends = now + seconds
            self._ask_at = now + self._pause

    def nap(self, now: float) -> float:
        """Return the seconds until the next action, whether or not the fleet changes."""
        return max(0.0, min(self.ends, self._ask_at) - now)

    def asks_again(self, now: float) -> bool:
        """Return whether it is time to ask again; true once for each pause."""
        if now < self._ask_at:
            return False
        self._pause *= 2
        self._ask_at = now + self._pause
        return True
