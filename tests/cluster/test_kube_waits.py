"""When the cluster's suite gives a wait up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.e2e_cluster import kube

SECONDS = 5.0


class Clock:
    """Stands in for ``time``."""

    now = 0.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let them pass."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which waits go."""
    made = Clock()
    monkeypatch.setattr(kube, "time", made)
    return made


def look_at(clock: Clock, comes: float, lasts: float) -> Callable[[], bool]:
    """A look by kubectl that sees at once what is there, and ends long after."""

    def look() -> bool:
        found = clock.now >= comes
        clock.now += lasts
        return found

    return look


def test_a_look_that_lasts_longer_than_the_wait_is_no_end(clock: Clock) -> None:
    """On a busy machine: it looked in time, when what is waited for was not yet to be there."""
    assert kube.wait_for("it", look_at(clock, comes=1.0, lasts=6.0), seconds=SECONDS)


@pytest.mark.parametrize("lasts", [0.0, 0.5, 6.0])
def test_what_is_late_is_not_waited_for(clock: Clock, lasts: float) -> None:
    """A look that was begun after the deadline has the last word."""
    with pytest.raises(AssertionError, match="waited 5 s for it"):
        kube.wait_for("it", look_at(clock, comes=SECONDS + 8.0, lasts=lasts), seconds=SECONDS)
    assert clock.now < SECONDS + 8.0
