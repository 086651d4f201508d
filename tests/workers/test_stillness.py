"""What a worker says of the times at which its whole process stood still."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from tests.waiting import wait_for

from tandem.worker.engine_proc import STILL_SECONDS, TICK_SECONDS, StallWatchdog

LATE_SECONDS = STILL_SECONDS + 2 * TICK_SECONDS


@pytest.fixture
def stillness() -> Iterator[StallWatchdog]:
    """Not started: as a thread that the machine lets nowhere."""
    made = StallWatchdog()
    yield made
    made.stop()
    if made.ident is not None:
        made.join(10)


def test_a_stop_before_the_first_tick_is_noticed(stillness: StallWatchdog) -> None:
    """A request came, and the process stood still before the thread that watches woke."""
    asked_at = time.monotonic()
    stillness.watch()
    watched_at = time.monotonic()
    time.sleep(LATE_SECONDS)
    (running,) = stillness.stops()
    stillness.start()
    stop = wait_for(lambda: stillness._stops)[0]
    for each in (running, stop):
        assert asked_at <= each.begin <= watched_at
        assert each.end - each.begin >= LATE_SECONDS - TICK_SECONDS


def test_nobody_stood_still_while_nobody_was_watched(stillness: StallWatchdog) -> None:
    """The thread waits for who asks, and that is no stop."""
    stillness.start()
    time.sleep(LATE_SECONDS)
    watched_at = time.monotonic()
    stillness.watch()
    assert all(each.begin >= watched_at for each in stillness.stops())
