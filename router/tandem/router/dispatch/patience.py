"""How long a request waits for a worker that could take it. Pure: the caller has the clock.

It waits because somebody is gone and may come back, or has a successor. Meanwhile those that were
full, or asleep, may be so no more: they are asked again, after pauses that grow.
"""

from __future__ import annotations

import math

FIRST_PAUSE = 1.0
"""Seconds until they are asked again for the first time; each pause is twice the last."""


class Patience:
    """Of one request, from when no worker was left until one has worked for it."""

    __slots__ = ("_ask_at", "_pause", "ends")

    def __init__(self) -> None:
        self.over()

    def over(self) -> None:
        """A worker has worked for it: what it waits from now on is another wait."""
        self.ends = math.inf
        """When it is told that nobody is there."""
        self._ask_at = math.inf
        self._pause = FIRST_PAUSE

    def begin(self, now: float, seconds: float) -> None:
        """No worker is left. Refusals of those that are asked again do not make it longer."""
        if self.ends == math.inf:
            self.ends = now + seconds
            self._ask_at = now + self._pause

    def nap(self, now: float) -> float:
        """Seconds until something is to be done, whether or not the fleet changes."""
        return max(0.0, min(self.ends, self._ask_at) - now)

    def asks_again(self, now: float) -> bool:
        """Whether it is time to; once for each pause."""
        if now < self._ask_at:
            return False
        self._pause *= 2
        self._ask_at = now + self._pause
        return True
