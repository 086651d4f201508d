"""Waits for copies whose end is not signalled: asleep until shortly before, polling around it.

The end is predicted from the rate of earlier copies, as constant polling would take a processor.
Moments are of ``time.perf_counter``; inf is unknown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence


class ProgressBoard:
    """Counters that only grow, and whether there is work at all."""

    __slots__ = ("engine_turns", "has_work", "transfers")

    def __init__(self) -> None:
        self.engine_turns = 0
        """Turns of the engine's loop, stepping or idle."""
        self.transfers = 0
        """Parts packed, read or unpacked."""
        self.has_work = False

    def note_engine(self, has_work: bool) -> None:
        """Record a turn of the engine's loop."""
        self.engine_turns += 1
        self.has_work = has_work


AHEAD_SECONDS = 1.5e-4
"""Seconds awake before the moment, as naps end late."""
WATCH_SECONDS = 5e-4
"""Seconds awake after the moment, as the link may be shared."""


def is_foretold(moment: float) -> bool:
    """Return whether the moment is known and not long past; if not, the copy is polled with
    naps."""
    return time.perf_counter() - WATCH_SECONDS < moment < math.inf


def nap_before(moments: Sequence[float]) -> float | None:
    """Return the seconds until the first moment is near; None without one, or if one is unknown."""
    if not moments or not all(map(is_foretold, moments)):
        return None
    return max(0.0, min(moments) - AHEAD_SECONDS - time.perf_counter())


def watch(moments: Sequence[float], stirs: Callable[[], bool]) -> bool:
    """Poll ``stirs`` until it is true or the near moments have passed. Return False at once,
    without a poll, if none is near."""
    now = time.perf_counter()
    near = [each for each in moments if is_foretold(each) and each - now <= AHEAD_SECONDS]
    if not near:
        return False
    end = max(near) + WATCH_SECONDS
    while not stirs() and time.perf_counter() < end:
        pass
    return True
