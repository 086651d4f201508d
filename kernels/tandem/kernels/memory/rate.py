"""How fast copies from one place are, from what earlier ones took. Pure."""

from __future__ import annotations

import math

MOST_TIMES = 4
"""How many times larger than the largest that was timed a copy may be to be foretold: small ones
spend their time on other things than bytes."""
LARGE_BYTES = 128 << 20
"""A copy of so many says what the link does, however large others were."""
_FADE = 16
"""A slower copy takes one part in so many of the difference off the rate."""


class Rate:
    """The best bytes a second, fading: what is foretold is rather too early than too late."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._largest = 0

    def took(self, nbytes: int, seconds: float) -> None:
        """One copy's time."""
        if nbytes < min(self._largest // MOST_TIMES, LARGE_BYTES):
            return
        self._largest = max(self._largest, nbytes)
        seen = nbytes / seconds
        self._rate = seen if seen > self._rate else self._rate + (seen - self._rate) / _FADE

    def seconds_for(self, nbytes: int) -> float:
        """That a copy is likely to take; inf if nothing says so."""
        if not self._rate or nbytes > MOST_TIMES * self._largest:
            return math.inf
        return nbytes / self._rate
