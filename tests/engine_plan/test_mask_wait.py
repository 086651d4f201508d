"""How long masks are waited for: what a step has left over, and no more."""

from __future__ import annotations

import pytest

from tandem.engine.core import engine_core
from tandem.engine.core.engine_core import LEAST_S, MARGIN_S, MOST_S, STEPS, MaskWait


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(engine_core, "time", made)
    return made


def step(wait: MaskWait, clock: Clock, *, device: float, host: float, mask: float) -> float:
    """One step of a device that takes ``device`` seconds, a host that takes ``host`` and a mask
    that is there after ``mask``; seconds that the device stood still for."""
    begun = clock.now
    clock.now = min(wait.until(), begun + mask)
    clock.now += host / 2
    wait.over()
    clock.now += host / 2
    idle = max(0.0, begun + device - clock.now)
    clock.now += idle
    wait.updated(idle)
    return clock.now - begun - device


def room(wait: MaskWait, clock: Clock) -> float:
    return wait.until() - clock.now


@pytest.mark.parametrize(("device", "host"), [(5e-3, 1e-3), (5e-3, 4e-3), (30e-3, 2e-3)])
def test_masks_that_never_come_keep_the_device_busy(clock: Clock, device: float, host: float):
    """Whatever a step takes, the wait comes to what is left over, less the margin at most twice."""
    wait = MaskWait(overlaps=True)
    for _ in range(5 * STEPS):
        step(wait, clock, device=device, host=host, mask=1.0)
    stood = [step(wait, clock, device=device, host=host, mask=1.0) for _ in range(50)]
    expected = min(max(device - host, LEAST_S), MOST_S)
    assert max(stood) <= max(0.0, LEAST_S + host - device) + 1e-9
    assert expected - 2 * MARGIN_S - 1e-9 <= room(wait, clock) <= expected + 1e-9


def test_a_host_that_is_slower_than_the_device_waits_the_least(clock: Clock):
    """What is done behind the wait does not count as waited for, or the wait would grow."""
    wait = MaskWait(overlaps=True)
    for _ in range(100):
        step(wait, clock, device=2e-3, host=6e-3, mask=1.0)
    assert room(wait, clock) == pytest.approx(LEAST_S)


def test_a_long_step_does_not_lengthen_the_wait_of_a_short_one(clock: Clock):
    """A prompt's step among decodes leaves no more to those behind it."""
    wait = MaskWait(overlaps=True)
    for _ in range(2 * STEPS):
        step(wait, clock, device=5e-3, host=1e-3, mask=1e-5)
    step(wait, clock, device=80e-3, host=1e-3, mask=1e-5)
    assert room(wait, clock) <= 4e-3


def test_without_overlap_nothing_is_left_over(clock: Clock):
    """On a CPU the step loop computes, and a wait is a wait for all."""
    wait = MaskWait(overlaps=False)
    for _ in range(2 * STEPS):
        step(wait, clock, device=50e-3, host=1e-3, mask=1.0)
    assert room(wait, clock) == pytest.approx(LEAST_S)
