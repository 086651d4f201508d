"""The work queue: once per key, one worker per key, later after a failure. Virtual time."""

from __future__ import annotations

import threading

from tandem.operator.cluster import ClusterError
from tandem.operator.look import Trigger
from tandem.operator.loop.queue import LAST_BACKOFF, WorkQueue, work
from tandem.operator.metrics import OperatorMetrics
from tandem.operator.run import ended

A, B = ("ns", "a"), ("ns", "b")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def queue() -> tuple[WorkQueue, Clock]:
    clock = Clock()
    return WorkQueue(OperatorMetrics(), clock), clock


def test_a_key_is_taken_once_however_often_it_was_added():
    work, _ = queue()
    for _ in range(5):
        work.add(A, why=Trigger.SERVICE)
    assert work.take(0) == A
    assert work.take(0) is None


def test_a_key_is_never_with_two_workers():
    """What changes during a look is looked at after it, not beside it."""
    work, _ = queue()
    work.add(A, why=Trigger.SERVICE)
    assert work.take(0) == A
    work.add(A, why=Trigger.SERVICE)
    work.add(B, why=Trigger.SERVICE)
    assert work.take(0) == B
    assert work.take(0) is None
    work.done(A)
    assert work.take(0) == A


def test_an_earlier_date_wins():
    """A look that is due later does not hold up one that is due now."""
    work, clock = queue()
    work.add(A, 30, why=Trigger.SERVICE)
    work.add(A, 5, why=Trigger.SERVICE)
    work.add(A, 60, why=Trigger.SERVICE)
    assert work.take(0) is None
    clock.now = 5
    assert work.take(0) == A
    clock.now = 100
    assert work.take(0) is None


def test_failures_back_off_and_success_forgets_them():
    """One second, two, four, up to a minute; then from the start again."""
    work, clock = queue()
    waits = []
    work.add(A, why=Trigger.SERVICE)
    for _ in range(8):
        assert work.take(0) == A
        waits.append(work.failed(A))
        assert work.take(0) is None
        clock.now += waits[-1]
    assert work.take(0) == A
    assert waits[:4] == [1, 2, 4, 8]
    assert max(waits) == LAST_BACKOFF
    work.done(A)
    work.add(A, why=Trigger.SERVICE)
    assert work.take(0) == A
    assert work.failed(A) == 1


def test_a_look_that_fails_for_days_ends_no_worker():
    """A thousand failures in a row are a minute's wait like the tenth, and the thread that looks
    goes on with other services."""
    waiting, clock = queue()
    waiting.add(A, why=Trigger.SERVICE)
    for _ in range(1100):
        assert waiting.take(0) == A
        clock.now += waiting.failed(A)
    waiting.add(B, why=Trigger.SERVICE)
    looked = []

    def look(key: tuple[str, str]) -> None:
        looked.append(key)
        if key == A:
            raise ClusterError(422, "Invalid", "no")
        waiting.stop()

    work(waiting, look, OperatorMetrics())
    assert looked == [A, B]


def test_an_operator_without_one_of_its_threads_is_told_of():
    """The process ends by it, so that another one begins with all of them."""
    stop = threading.Event()
    alive = threading.Thread(target=stop.wait)
    dead = threading.Thread(target=lambda: None)
    for thread in (alive, dead):
        thread.start()
    dead.join()
    try:
        assert ended({"watching": [alive], "looking": [alive, alive]}) is None
        assert ended({"watching": [alive], "looking": [alive, dead]}) == "looking"
    finally:
        stop.set()
        alive.join()


def test_a_stopped_queue_gives_nothing():
    """Workers end when the queue does."""
    work, _ = queue()
    work.add(A, why=Trigger.SERVICE)
    work.stop()
    assert work.take(0) is None


def test_a_service_rests_as_long_as_a_look_takes():
    """What was asked for during a look waits for the rest; what comes later does not."""
    work, clock = queue()
    work.add(A, why=Trigger.SERVICE)
    assert work.take(0) == A
    work.add(A, why=Trigger.SERVICE)
    work.done(A, rest=2)
    assert work.take(0) is None
    clock.now = 2
    assert work.take(0) == A
    work.done(A, rest=2)
    work.add(A, why=Trigger.SERVICE)
    assert work.take(0) == A


def test_a_look_knows_what_it_is_taken_for():
    """All reasons whose date has come, each once; not what would have been due later, which the
    look meets with it."""
    work, clock = queue()
    work.add(A, 30, why=Trigger.RESYNC)
    work.add(A, why=Trigger.CHILD)
    work.because(Trigger.CANARY)(A)
    work.add(A, why=Trigger.CHILD)
    assert work.take(0) == A
    assert sorted(work.why(A)) == [Trigger.CANARY, Trigger.CHILD]
    work.add(A, 10, why=Trigger.RESYNC)  # asked for while the look goes on: for the next one
    work.done(A, again=5)
    assert work.why(A) == ()
    clock.now = 5
    assert work.take(0) == A
    assert work.why(A) == (Trigger.AGAIN,)
    clock.now += work.failed(A)
    assert work.take(0) == A
    assert work.why(A) == (Trigger.RETRY,)
