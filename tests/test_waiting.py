"""When waits of tests are given up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests import waiting
from tests.waiting import EVERY, LOOKS, MOST_SECONDS, SECONDS, wait_for


class Clock:
    """Stands in for ``time``; a sleep may take longer than it is asked to."""

    def __init__(self, late: Callable[[int], float]) -> None:
        """``late``: by how many seconds the sleep of a number is."""
        self.now, self.sleeps = 0.0, 0
        self._late = late

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let them pass."""
        self.now += seconds + self._late(self.sleeps)
        self.sleeps += 1


MakeClock = Callable[[Callable[[int], float]], Clock]


@pytest.fixture
def clock_of(monkeypatch: pytest.MonkeyPatch) -> MakeClock:
    """A clock by which waits go from now on."""

    def made(late: Callable[[int], float]) -> Clock:
        clock = Clock(late)
        monkeypatch.setattr(waiting, "time", clock)
        return clock

    return made


def test_a_stretch_without_a_turn_is_no_end(clock_of: MakeClock) -> None:
    """What is waited for had none either, and comes in the next looks."""
    clock = clock_of(lambda number: 30.0 if number == 1 else 0.0)
    assert wait_for(lambda: clock.sleeps >= LOOKS - 1)
    assert SECONDS < clock.now < MOST_SECONDS


@pytest.mark.parametrize("every", [EVERY, 0.001])
def test_one_behind_many_looks_is_none_either(clock_of: MakeClock, every: float) -> None:
    """They were over when it began: it is no waiting, whenever it comes."""
    clock = clock_of(lambda number: 30.0 if number == 500 else 0.0)
    assert wait_for(lambda: clock.sleeps >= 510 + LOOKS, every=every)
    assert clock.now > SECONDS


@pytest.mark.parametrize(("late", "ends"), [(0.0, SECONDS), (0.3, 0.3 * LOOKS), (5, MOST_SECONDS)])
def test_what_does_not_come_ends_the_test(clock_of: MakeClock, late: float, ends: float) -> None:
    """At the deadline, where there were looks enough by then; in any case before pytest ends it."""
    clock = clock_of(lambda _: late)
    with pytest.raises(AssertionError, match="it did not happen in"):
        wait_for(lambda: False)
    assert ends <= clock.now < ends * 1.06


@pytest.mark.parametrize("seconds", [0.5, 5.0])
def test_a_promise_of_seconds_is_one_of_seconds(clock_of: MakeClock, seconds: float) -> None:
    """However few looks they are."""
    clock = clock_of(lambda _: 1.0)
    with pytest.raises(AssertionError, match=r"not happen in .* s: nothing"):
        wait_for(lambda: False, seconds, seen=lambda: "nothing")
    assert clock.now <= seconds + 1.01
