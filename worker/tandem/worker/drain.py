"""Drain of a worker: no new requests, a grace for running ones, then hand-back to the routers.

Pure over a clock, so that a test requires no waiting. The shell calls it once a turn of its loop.
"""

from __future__ import annotations

RELEASE_SECONDS = 10.0
"""Seconds after the hand-back in which peers can fetch KV that is leased to them."""
KILL_MARGIN = 30.0
"""Seconds before a known kill for hand-back and release; at most half of the time left."""


class Drain:
    """Drain of a worker. ``begin`` from any thread (one assignment decides), else from the loop."""

    def __init__(self) -> None:
        self._ends: tuple[float, float] | None = None
        """Times of the hand-back of running requests, and of the end of the wait for peers."""

    @property
    def begun(self) -> bool:
        """Return whether the drain has begun."""
        return self._ends is not None

    def begin(self, now: float, grace: float) -> bool:
        """Begin to drain, with ``grace`` seconds for running requests; False if one ends earlier.

        A grace of zero ends at once: there is no wait for peers either.
        """
        hand_back = now + grace
        if self._ends is not None and self._ends[0] <= hand_back:
            return False
        self._ends = (hand_back, hand_back + (RELEASE_SECONDS if grace else 0.0))
        return True

    def hands_back(self, now: float) -> bool:
        """Return whether requests that still run are to be handed back to the routers now."""
        return self._ends is not None and now >= self._ends[0]

    def over(self, now: float) -> bool:
        """Return whether the drain has ended: the worker waits for no peer any more."""
        return self._ends is not None and now >= self._ends[1]


def grace_before(killed_in: float) -> float:
    """Return the grace in seconds of a process that is killed in ``killed_in`` seconds."""
    return max(killed_in / 2, killed_in - KILL_MARGIN)
