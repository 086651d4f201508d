"""How tests wait for what another thread or process does: they ask again and again, to a deadline.

Never a sleep for luck: what is waited for is said, and where it did not come the error has what was
there instead. Deadlines are far off, since a slow machine is no fault.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SECONDS = 20.0
EVERY = 0.01


def wait_for(
    found: Callable[[], T | None],
    seconds: float = SECONDS,
    *,
    every: float = EVERY,
    seen: Callable[[], object] = lambda: "",
) -> T:
    """The first true answer of ``found``; at the deadline an error with what ``seen`` says."""
    deadline = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < deadline, f"it did not happen in {seconds:g} s: {seen()}"
        time.sleep(every)
    return answer


async def until(found: Callable[[], T | None], seconds: float = SECONDS) -> T:
    """The same within a loop that goes on meanwhile."""
    deadline = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < deadline, f"it did not happen in {seconds:g} s"
        await asyncio.sleep(EVERY)
    return answer
