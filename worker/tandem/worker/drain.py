"""How a worker leaves: nothing new, time for what runs, then everything back to the routers.

Pure over a clock, so that a test needs no waiting. The shell asks it once a turn of its loop.
"""

from __future__ import annotations

RELEASE_SECONDS = 10.0
"""After the hand-back: time for peers to fetch what they were promised."""
KILL_MARGIN = 30.0
"""Of a known time of death, what is kept for hand-back and release; at most half of it."""


class Drain:
    """``begin`` from any thread (a single assignment decides), the rest from the loop."""

    def __init__(self) -> None:
        self._ends: tuple[float, float] | None = None
        """When what runs is handed back, and when the worker waits for nobody any more."""

    @property
    def begun(self) -> bool:
        """Whether the worker leaves."""
        return self._ends is not None

    def begin(self, now: float, grace: float) -> bool:
        """Leave, with ``grace`` seconds for what runs; False if an earlier end stands.

        A grace of zero ends at once: peers are not waited for either.
        """
        hand_back = now + grace
        if self._ends is not None and self._ends[0] <= hand_back:
            return False
        self._ends = (hand_back, hand_back + (RELEASE_SECONDS if grace else 0.0))
        return True

    def hands_back(self, now: float) -> bool:
        """Whether what still runs goes back to the routers now."""
        return self._ends is not None and now >= self._ends[0]

    def over(self, now: float) -> bool:
        """Whether nobody is waited for any more."""
        return self._ends is not None and now >= self._ends[1]


def grace_before(killed_in: float) -> float:
    """Seconds for what runs, of a process that is killed in ``killed_in`` seconds."""
    return max(killed_in / 2, killed_in - KILL_MARGIN)
