"""Who counts as silent: never because of the time in which the worker itself stood still."""

from __future__ import annotations

import time

from tests.workers.hand_router import Router
from tests.workers.io_worker import Worker

from tandem.engine.core.links import LOST_SECONDS


def test_a_router_is_not_silent_while_the_worker_stood_still() -> None:
    """The frames of that time are unread; the same silence without an excuse ends the link."""
    worker = Worker()
    worker.thread.start()
    router = Router(worker.endpoint)
    router.greet()
    worker.thread.stop()
    known = worker.thread._links
    (peer,) = known._by_identity.values()

    peer.heard = time.monotonic() - 2 * LOST_SECONDS
    known.drop_silent(2 * LOST_SECONDS)
    assert known._by_identity
    peer.heard = time.monotonic() - 2 * LOST_SECONDS
    known._write_parts = lambda parts: True
    known.drop_silent()
    assert not known._by_identity
    router.socket.close()
