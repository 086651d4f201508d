"""Full passes of Python's garbage collector, made while no request is under way.

A full pass stops all streams while it traverses the objects of all requests, some 200 each: 25 to
50 ms with 200 requests. Python makes one whenever the number of objects has grown by a quarter,
every few seconds under load. An ended request leaves no cycle, so a pass finds hardly anything. It
waits for a quiet moment, but not without bound.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

SECONDS = 1.0
"""Seconds between two checks for a quiet moment."""
YOUNGEST, YOUNGER = 700, 2
"""Thresholds of the first two generations: a pass over both traverses some 2,000 objects."""
NEVER = 2**31 - 1
WORTH = 10
"""Passes over the younger generations after which a full one is worth a quiet moment."""
MOST = 2_000
"""Passes after which a full one is made even under load: some 4 million objects came by then."""


@asynccontextmanager
async def paced(is_quiet: Callable[[], bool]) -> AsyncIterator[None]:
    """Make full passes until the block ends: when ``is_quiet``, or too many objects have come.
    Objects that exist at the start are never traversed again."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNGEST, YOUNGER, NEVER)
    watching = asyncio.create_task(_watch(is_quiet), name="full-passes")
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        gc.set_threshold(*before)


async def _watch(is_quiet: Callable[[], bool]) -> None:
    while True:
        await asyncio.sleep(SECONDS)
        if is_due(gc.get_count()[2], quiet=is_quiet()):
            gc.collect()


def is_due(passes: int, *, quiet: bool) -> bool:
    """Return whether a full pass is due after ``passes`` over the younger generations."""
    return passes >= MOST or (quiet and passes >= WORTH)
