"""A worker's I/O thread against routers that greet, go silent, or talk garbage."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.workers.hand_router import Router, dealer
from tests.workers.io_worker import Worker

from tandem.engine.core import links
from tandem.engine.core.inbox import FromRouter, RouterLost
from tandem.protocol.card import PROTOCOL_VERSION
from tandem.protocol.ids import new_incarnation
from tandem.protocol.link import Link
from tandem.protocol.messages import (
    Beat,
    Cancel,
    Frame,
    Hello,
    Reset,
    WorkerBeat,
    decode_to_router,
    encode,
)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """One thread for the module: nothing that a test does may end it."""
    made = Worker()
    made.thread.start()
    yield made
    made.thread.stop()
    assert not made.thread.is_alive()


@pytest.fixture
def router(worker: Worker) -> Iterator[Router]:
    """A router that has not greeted yet; its loss is taken out of the inbox afterwards."""
    made = Router(worker.endpoint)
    yield made
    made.socket.close()
    worker.inbox.take()


def test_a_greeting_is_answered_with_the_card(worker: Worker, router: Router) -> None:
    """The router learns what is served, and gets beats from then on."""
    router.greet()

    assert isinstance(router.hear(WorkerBeat), WorkerBeat)


def test_a_message_reaches_the_step_loop(worker: Worker, router: Router) -> None:
    """What a greeted router says comes out of the inbox under its incarnation."""
    router.greet()
    router.say(Cancel("r", 3))

    assert worker.next() == FromRouter(router.link.me, Cancel("r", 3))


def test_frames_go_to_their_router_only(worker: Worker, router: Router) -> None:
    """A frame for one router is not heard by another."""
    other = Router(worker.endpoint)
    router.greet()
    other.greet()
    worker.thread.send(router.link.me, Frame(step=7))
    worker.thread.flush()

    assert router.hear(Frame) == Frame(step=7)
    while other.socket.poll(200):
        payload = other.socket.recv_multipart()[1]
        assert not isinstance(decode_to_router(payload), Frame)
    other.socket.close()


def test_a_message_before_the_greeting_is_reset(worker: Worker, router: Router) -> None:
    """Nobody may cancel what is not his."""
    router.say(Cancel("r", 0))

    assert isinstance(router.hear(Reset), Reset)
    assert worker.inbox.empty


def test_a_lost_frame_loses_the_router(worker: Worker, router: Router) -> None:
    """A gap in the sequence fails everything of that router, and says so to both ends."""
    router.greet()
    router.link.seal()
    router.say(Cancel("r", 0))

    assert isinstance(router.hear(Reset), Reset)
    assert isinstance(worker.next(), RouterLost)


def test_another_protocol_version_is_turned_away(worker: Worker, router: Router) -> None:
    """Both versions are in the answer."""
    router.say(Hello(PROTOCOL_VERSION + 1))

    answer = router.hear(Reset)
    assert isinstance(answer, Reset)
    assert f"protocol {PROTOCOL_VERSION + 1}" in answer.reason


def test_a_silent_router_is_lost(
    worker: Worker, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without beats its requests are dropped after the limit."""
    monkeypatch.setattr(links, "LOST_SECONDS", 0.5)
    router.greet()

    lost = worker.next()
    while isinstance(lost, RouterLost) and lost.router != router.link.me:
        lost = worker.next()  # routers of other tests, long closed
    assert isinstance(lost, RouterLost)


def test_a_greeting_again_drops_what_was(worker: Worker, router: Router) -> None:
    """A router that starts over has lost its requests, and is served again."""
    router.greet()
    router.link.restart()
    router.greet()

    assert isinstance(worker.next(), RouterLost)
    router.say(Cancel("r", 1))
    assert isinstance(worker.next(), FromRouter)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=5))
def test_garbage_is_counted_and_harms_nobody(worker: Worker, parts: list[bytes]) -> None:
    """Random parts of any number and size are dropped; the thread lives on."""
    with dealer(worker.endpoint) as stranger:
        stranger.send_multipart(parts)

    assert worker.thread.is_alive()


def test_after_garbage_routers_are_served(worker: Worker, router: Router) -> None:
    """Truncated and oversized payloads under a right header are counted, then all is well."""
    router.greet()
    before = worker.dropped("garbage")
    good = encode(Cancel("r", 0))
    for payload in (good[:-2], os.urandom(1 << 20), b""):
        with dealer(worker.endpoint) as stranger:
            stranger.send_multipart([Link(new_incarnation()).seal(), payload])
    router.say(Cancel("mine", 0))

    assert worker.next() == FromRouter(router.link.me, Cancel("mine", 0))
    worker.thread.flush()
    for _ in range(100):
        if worker.dropped("garbage") >= before + 3:
            break
        router.say(Beat())
        router.socket.poll(20)
    assert worker.dropped("garbage") >= before + 3
