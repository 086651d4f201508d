"""Waiting for copies whose end nobody tells: asleep until shortly before, awake around it.

A GPU's copies wake no thread that sleeps on descriptors, and asking after them all the time would
take a processor and other threads' turns. So a copy has a moment at which it is likely to be
through, from the rate of those before it, and only around that moment it is asked after without a
pause; each question lets other threads of the interpreter run. Moments are of
``time.perf_counter``; inf is not known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

AHEAD_SECONDS = 1.5e-4
"""How long before the moment one is awake: a nap ends some tens of microseconds late, and who has
just woken is slow."""
WATCH_SECONDS = 5e-4
"""How long after it one stays awake: the link may be shared."""


def is_foretold(moment: float) -> bool:
    """Whether it is known and not long past: else the copy is to be asked after by and by."""
    return time.perf_counter() - WATCH_SECONDS < moment < math.inf


def nap_before(moments: Sequence[float]) -> float | None:
    """Seconds to sleep until the first moment is near; None if there is none, or one of them is not
    foretold."""
    if not moments or not all(map(is_foretold, moments)):
        return None
    return max(0.0, min(moments) - AHEAD_SECONDS - time.perf_counter())


def watch(moments: Sequence[float], stirs: Callable[[], bool]) -> bool:
    """Ask ``stirs`` until it says yes or the moments that are near have passed; False, without
    having asked, if none is near."""
    now = time.perf_counter()
    near = [each for each in moments if is_foretold(each) and each - now <= AHEAD_SECONDS]
    if not near:
        return False
    end = max(near) + WATCH_SECONDS
    while not stirs() and time.perf_counter() < end:
        pass
    return True
