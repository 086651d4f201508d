"""A worker that many routers call."""

import pytest
import zmq
from tests.many_links import NUM_LINKS
from tests.workers.hand_router import Router
from tests.workers.io_worker import Worker

from tandem.link.sockets import raise_descriptor_limit
from tandem.protocol.card import PROTOCOL_VERSION
from tandem.protocol.messages import Hello, Welcome


@pytest.mark.timeout(180)
def test_four_hundred_routers_are_welcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is greeted; none is dropped for being one of many."""
    raise_descriptor_limit(8 * NUM_LINKS)
    worker = Worker()
    worker.thread.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    monkeypatch.setattr(zmq.Context, "instance", lambda: context)
    routers = [Router(worker.endpoint) for _ in range(NUM_LINKS)]
    try:
        for router in routers:
            router.say(Hello(PROTOCOL_VERSION))
        for router in routers:
            router.hear(Welcome)
        assert worker.dropped("garbage") == 0
    finally:
        for router in routers:
            router.socket.close(0)
        context.term()
        worker.thread.stop()
