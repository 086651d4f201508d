"""Rate of copies from one source, from the times of earlier ones. Pure."""

from __future__ import annotations

import math

MOST_TIMES = 4
"""Factor over the largest timed copy up to which a time is predicted. Small copies spend their time
on other things than bytes."""
LARGE_BYTES = 128 << 20
"""Size of a copy that counts for the link's rate, however large others were."""
_FADE = 16
"""Divisor of the difference by which a slower copy lowers the rate."""


class Rate:
    """Best bytes a second, fading: a prediction is rather too early than too late."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._largest = 0

    def took(self, nbytes: int, seconds: float) -> None:
        """Record one copy's time."""
        if nbytes < min(self._largest // MOST_TIMES, LARGE_BYTES):
            return
        self._largest = max(self._largest, nbytes)
        seen = nbytes / seconds
        self._rate = seen if seen > self._rate else self._rate + (seen - self._rate) / _FADE

    def seconds_for(self, nbytes: int) -> float:
        """Return the predicted seconds of a copy; inf without a prediction."""
        if not self._rate or nbytes > MOST_TIMES * self._largest:
            return math.inf
        return nbytes / self._rate
