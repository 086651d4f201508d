"""Who counts as silent: never because of the time in which the worker itself stood still."""

from __future__ import annotations

import time

from tests.workers.hand_router import Router
from tests.workers.io_worker import Worker

from tandem.protocol.messages import Cancel, Reset
from tandem.worker.io import TIMES


def test_a_router_is_not_silent_while_the_worker_stood_still() -> None:
    """The frames of that time are unread; the same silence without an excuse ends the link."""
    worker = Worker()
    worker.thread.start()
    router = Router(worker.endpoint)
    router.greet()
    worker.thread.stop()
    links = worker.thread._links
    (known,) = links.listener.by_peer.values()
    links.listener._write = lambda parts: True
    now, silence = time.monotonic(), 2 * TIMES.beat_timeout

    known.session.alive._received_at = now - silence
    links.listener.drop_silent(now, silence)
    assert links.listener.by_peer
    known.session.alive._received_at = now - silence
    links.listener.drop_silent(now, 0.0)
    assert not links.listener.by_peer
    router.socket.close()


def test_a_router_that_says_more_than_the_step_loop_takes_is_reset() -> None:
    """What it said does not fill the memory; that it is lost is not lost on the step loop."""
    worker = Worker()
    worker.inbox._limit = 3
    worker.thread.start()
    router = Router(worker.endpoint)
    try:
        router.greet()
        for number in range(3):
            router.say(Cancel("r", number))
        assert "more than is accepted" in router.hear(Reset).reason
        kinds = [type(worker.next()).__name__ for _ in range(3)]
        assert kinds == ["FromRouter", "FromRouter", "RouterLost"]
    finally:
        router.socket.close()
        worker.thread.stop()
