"""How tests wait for what another thread or process does: they ask again and again, to a deadline.

Never a sleep for luck: what is waited for is said, and where it did not come the error has what was
there instead. Deadlines are far off, since a slow machine is no fault; and where all stood still
for as long as one, whoever is waited for is given turns yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SECONDS = 20.0
EVERY = 0.01
LOOKS = 200
"""Before a wait of ``SECONDS`` or more is given up: on a machine that does anything else they are
over by then, and each is a turn for the others."""
MOST_SECONDS = 100.0
"""Less than a test gets, so that it fails with words, however few its looks were."""


class Deadline:
    """When a wait is given up. What is given less than ``SECONDS`` is a promise of seconds, or is
    not to come: no look is added."""

    def __init__(self, seconds: float = SECONDS, every: float = EVERY) -> None:
        """``every``: seconds between two looks, or more."""
        self._start = time.monotonic()
        self._seconds = seconds
        self._missing = min(LOOKS, seconds / max(every, EVERY) / 2) if seconds >= SECONDS else 0.0

    def check(self, seen: Callable[[], object] = lambda: "") -> None:
        """After a look in vain: AssertionError with what ``seen`` says if it was the last."""
        self._missing -= 1
        waited = time.monotonic() - self._start
        late = self._missing <= 0 or waited >= MOST_SECONDS
        assert waited < self._seconds or not late, f"it did not happen in {waited:.3g} s: {seen()}"


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
