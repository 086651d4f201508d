"""How tests wait for what another thread or process does: they ask again and again, to a deadline.

Never a sleep for luck: what is waited for is said, and where it did not come the error has what was
there instead. Deadlines are far off, since a slow machine is no fault; and where all stood still
for as long as one, whoever is waited for is given turns yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import TypeVar

T = TypeVar("T")

SECONDS = 20.0
EVERY = 0.01
LOOKS = 200
"""Before a wait of ``SECONDS`` or more is given up: on a machine that does anything else they are
over by then, and each is a turn for the others."""
STILL_SECONDS = 1.0
"""From one look to the next, beyond the pause between them: all stood still, or the look itself
took so long, and that is no waiting."""
MOST_SECONDS = 100.0
"""Less than a test gets, so that it fails with words, however few its looks were."""


class Deadline:
    """When a wait is given up. What is given less than ``SECONDS`` is a promise of seconds, or is
    not to come: no look is added, and no second left out."""

    def __init__(self, seconds: float = SECONDS, every: float = EVERY) -> None:
        """``every``: seconds between two looks, or more."""
        self._start = self._last = time.monotonic()
        self._seconds, self._still = seconds, 0.0
        self._longest = every + STILL_SECONDS if seconds >= SECONDS else inf
        self._missing = min(LOOKS, seconds / max(every, EVERY) / 2) if seconds >= SECONDS else 0.0

    def check(self, seen: Callable[[], object] = lambda: "") -> None:
        """After a look in vain: AssertionError with what ``seen`` says if it was the last."""
        now = time.monotonic()
        self._missing -= 1
        if now - self._last > self._longest:
            self._still += now - self._last
        self._last, whole = now, now - self._start
        late = self._missing <= 0 and whole - self._still >= self._seconds
        late = whole >= self._seconds and (late or whole >= MOST_SECONDS)
        assert not late, f"it did not happen in {whole:.3g} s: {seen()}"


def wait_for(
    found: Callable[[], T | None],
    seconds: float = SECONDS,
    *,
    every: float = EVERY,
    seen: Callable[[], object] = lambda: "",
) -> T:
    """The first true answer of ``found``; at the deadline an error with what ``seen`` says."""
    deadline = Deadline(seconds, every)
    while not (answer := found()):
        deadline.check(seen)
        time.sleep(every)
    return answer


async def until(found: Callable[[], T | None], seconds: float = SECONDS) -> T:
    """The same within a loop that goes on meanwhile."""
    deadline = Deadline(seconds)
    while not (answer := found()):
        deadline.check()
        await asyncio.sleep(EVERY)
    return answer
