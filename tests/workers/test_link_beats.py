"""Routers place hand-offs by a worker's links, and hear of them when they change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.kvtransfer.builders import Consumer, Producer
from tests.workers.hand_router import Router
from tests.workers.proc_worker import Worker

from tandem.link.liveness import LinkTimes
from tandem.protocol.messages import PeerSet, WorkerBeat
from tandem.worker import io
from tandem.worker.io import Inbox


@pytest.fixture
def producer() -> Iterator[Producer]:
    """The hand-off of a prefill worker; it may be closed twice."""
    made = Producer()
    yield made
    made.service.close()


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch, producer: Producer) -> Iterator[Worker]:
    """A worker with the real hand-off of a decode worker, that beats once an hour by itself."""
    monkeypatch.setattr(io, "TIMES", LinkTimes(beat_interval=3600.0, beat_timeout=7200.0))
    inbox = Inbox()
    consumer = Consumer(notify=lambda: inbox.put(None))
    made = Worker(handoff=consumer.service, inbox=inbox)
    yield made
    made.end()
    made.probes.close()


def test_a_link_that_comes_up_or_goes_is_told_at_once(seldom: Worker, producer: Producer) -> None:
    """Not with the next beat: until then hand-offs would go another way, or nowhere."""
    router = Router(seldom.proc.endpoint)
    router.greet()
    control = producer.service.control
    assert control is not None
    router.say(PeerSet({control: producer.incarnation}))
    hear_until(router, producer, up=True)
    producer.service.close()
    hear_until(router, producer, up=False)
    router.socket.close()


def hear_until(router: Router, producer: Producer, *, up: bool) -> None:
    """Until a beat has the link so; fails where none comes."""
    states: list[bool] = []
    while states != [up]:
        peers = router.hear(WorkerBeat).peers
        states = [each.up for each in peers if each.peer == producer.incarnation]
