"""Who counts as alive: by silence, by progress, and never by the judge's own sleep."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tandem.link.liveness import LinkTimes, Liveness, Pulse
from tandem.protocol.messages import Beat

TIMES = LinkTimes(beat_interval=1.0, beat_timeout=5.0, stall_timeout=20.0)


def test_silence() -> None:
    """Up to the timeout and not a moment longer; any frame starts over."""
    alive = Liveness(TIMES, 100.0)
    assert alive.overdue(105.0) is None
    assert "silent" in str(alive.overdue(105.1))
    assert "HELLO" in str(alive.overdue(105.1, greeting=True))
    alive.received(105.0)
    assert alive.overdue(110.0) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=60))
def test_stall_needs_pending_work(history) -> None:
    """Lost exactly when no counter moved for the timeout while every beat had work."""
    alive = Liveness(TIMES, 0.0)
    step, since = 0, 0.0
    last_work = False
    for second, (progress, work) in enumerate(history, start=1):
        step += progress
        alive.received(float(second))
        alive.progress(float(second), Beat(engine_step=step, has_work=work))
        if progress or not work:
            since = float(second)
        last_work = work
        stalled = last_work and second - since > TIMES.stall_timeout
        assert (alive.overdue(float(second)) is not None) == stalled
        if stalled:
            return


def test_idle_is_no_stall() -> None:
    """Counters may stand still for ever without work."""
    alive = Liveness(replace(TIMES, beat_timeout=1e9), 0.0)
    alive.progress(1.0, Beat())
    assert alive.overdue(1000.0) is None


def test_who_overslept_judges_nobody_for_it() -> None:
    """Silence while the router itself stood still is not the worker's; later silence is."""
    alive = Liveness(TIMES, 100.0)
    alive.overslept(30.0)
    assert alive.overdue(135.0) is None
    assert "silent" in str(alive.overdue(135.1))


def test_hello_may_be_answered_in_its_own_time() -> None:
    alive = Liveness(replace(TIMES, greet_timeout=7.0), 100.0)
    assert alive.overdue(107.0, greeting=True) is None
    assert alive.overdue(107.1, greeting=True) == "no answer to HELLO for 7 s"
    assert alive.overdue(106.0) == "silent for 5 s"


def test_a_pulse_is_due_at_once_and_then_once_an_interval() -> None:
    """What was missed is not made up for; the first beat is never late."""
    pulse = Pulse(1.0)
    assert [pulse.late(at) for at in (50.0, 50.9, 51.0, 51.5)] == [0.0, None, 0.0, None]
    assert pulse.late(60.0) == 8.0
    assert pulse.next == 61.0
    assert pulse.late(60.5) is None
