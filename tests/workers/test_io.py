"""A worker's I/O thread against routers that greet, go silent, or talk garbage."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.hand_link import HandLink
from tests.waiting import wait_for
from tests.workers.hand_router import Router, dealer
from tests.workers.io_worker import Worker

from tandem.link.liveness import LinkTimes
from tandem.link.sockets import decode_to_router
from tandem.protocol.card import PROTOCOL_VERSION
from tandem.protocol.ids import new_incarnation
from tandem.protocol.messages import (
    Cancel,
    Frame,
    Hello,
    Reset,
    WorkerBeat,
    encode,
)
from tandem.worker import io
from tandem.worker.io import FromRouter, RouterFound, RouterLost


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

    assert worker.next(router.link.me) == FromRouter(router.link.me, Cancel("r", 3))


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
    router.say(Cancel("r", 0))

    assert isinstance(router.hear(Reset), Reset)
    assert not worker.messages()


def test_a_lost_frame_loses_the_router(worker: Worker, router: Router) -> None:
    """A gap in the sequence fails everything of that router, and says so to both ends."""
    router.greet()
    router.link.seal()
    router.say(Cancel("r", 0))

    assert isinstance(router.hear(Reset), Reset)
    assert isinstance(worker.next(router.link.me), RouterLost)


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
    listener = worker.thread._links.listener
    hasty = replace(listener._terms, times=LinkTimes(beat_timeout=0.5))
    monkeypatch.setattr(listener, "_terms", hasty)
    router.greet()

    assert isinstance(worker.next(router.link.me), RouterLost)


def test_a_greeting_again_drops_what_was(worker: Worker, router: Router) -> None:
    """A router that starts over has lost its requests, and is served again."""
    router.greet()
    router.link.restart()
    router.greet()

    assert isinstance(worker.next(router.link.me), RouterLost)
    router.say(Cancel("r", 1))
    assert isinstance(worker.next(router.link.me), FromRouter)


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
            stranger.send_multipart([HandLink(new_incarnation()).seal(), payload])
    router.say(Cancel("mine", 0))

    assert worker.next(router.link.me) == FromRouter(router.link.me, Cancel("mine", 0))
    worker.thread.flush()
    wait_for(lambda: worker.dropped("garbage") >= before + 3)


def test_what_is_flushed_is_written_by_the_caller(
    worker: Worker, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other thread has to wake before a token leaves."""
    writers = []
    write = worker.thread._links.write

    def noted(parts: list[bytes]) -> bool:
        writers.append(threading.get_ident())
        return write(parts)

    router.greet()
    monkeypatch.setattr(worker.thread._links, "write", noted)
    worker.thread.send(router.link.me, Frame(step=7))
    worker.thread.flush()
    assert threading.get_ident() in writers
    assert router.hear(Frame) == Frame(step=7)


def attended(worker: Worker) -> list[object]:
    """What an attending step loop gets; that routers have come or gone wakes it too."""
    for _ in range(20):
        worker.thread.attend(10)
        came = worker.inbox.take()
        if got := [each for each in came if not isinstance(each, RouterFound | RouterLost)]:
            return list(got)
    raise AssertionError("nothing came")


def test_an_idle_step_loop_reads_the_socket_itself(
    worker: Worker, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it attends, what comes wakes it, and no other thread before it; then the thread goes on
    as before."""
    router.greet()
    readers = []
    read = worker.thread._on_frame

    def noted(parts: list[bytes]) -> None:
        readers.append(threading.get_ident())
        read(parts)

    monkeypatch.setattr(worker.thread, "_on_frame", noted)
    soon = threading.Timer(0.3, router.say, [Cancel("r", 3)])
    soon.start()
    assert attended(worker) == [FromRouter(router.link.me, Cancel("r", 3))]
    assert readers[-1] == threading.get_ident()
    soon.join()
    router.say(Cancel("r", 4))
    assert worker.next(router.link.me) == FromRouter(router.link.me, Cancel("r", 4))
    assert readers[-1] != threading.get_ident()


def test_attending_ends_when_anybody_puts_something_into_the_inbox(worker: Worker) -> None:
    """A connector wakes the loop from another thread, whether or not a frame comes."""
    soon = threading.Timer(0.3, worker.inbox.put, [None])
    soon.start()
    assert attended(worker) == [None]
    soon.join()


def test_who_was_rung_for_is_not_kept_by_the_socket(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV has come: the loop is not to read frames that have not."""
    receive, calls = worker.thread._receive, []

    def noted() -> None:
        calls.append(threading.get_ident())
        receive()

    def put() -> None:
        calls.clear()
        worker.inbox.put(None)

    monkeypatch.setattr(worker.thread, "_receive", noted)
    soon = threading.Timer(0.3, put)
    soon.start()
    assert attended(worker) == [None]
    assert threading.get_ident() not in calls
    soon.join()


def test_a_loop_that_woke_is_crossed_by_no_other_thread_before_it_leaves(
    worker: Worker, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread stands by, for a while, until the loop says that its step is launched."""
    router.greet()
    monkeypatch.setattr(io, "STAND_BY_SECONDS", 60.0)
    soon = threading.Timer(0.3, worker.inbox.put, [None])
    soon.start()
    assert attended(worker) == [None]
    router.say(Cancel("r", 5))
    time.sleep(0.3)
    assert not worker.messages()
    worker.thread.leave()
    assert worker.next(router.link.me) == FromRouter(router.link.me, Cancel("r", 5))
    soon.join()


def test_beats_go_on_while_the_step_loop_attends(worker: Worker, router: Router) -> None:
    """An idle worker is not taken for a dead one."""
    router.greet()
    loop = threading.Thread(target=attended, args=[worker])
    loop.start()
    for _ in range(2):
        assert isinstance(router.hear(WorkerBeat), WorkerBeat)
    assert loop.is_alive()
    worker.inbox.put(None)
    loop.join()


def test_a_frame_that_comes_while_a_beat_is_made_is_read(
    worker: Worker, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing the beat swallows the socket's word of it: without another look it lies there until
    somebody else says something."""
    router.greet()
    beat, me = worker.thread._beat, threading.get_ident()
    said: list[Cancel] = []

    def crossed() -> WorkerBeat:
        if not said and threading.get_ident() == me:
            said.append(Cancel("r", 6))
            router.say(said[0])
            time.sleep(0.05)  # it is in the socket, and a write processes what came
        return beat()

    monkeypatch.setattr(worker.thread, "_beat", crossed)
    mine: list[object] = []
    while not mine:  # routers of other tests are lost meanwhile, this one if it is not heard
        worker.thread.attend(10)
        heard = [each for each in worker.inbox.take() if isinstance(each, FromRouter | RouterLost)]
        mine += [each for each in heard if each.router == router.link.me]
    assert mine == [FromRouter(router.link.me, Cancel("r", 6))]


def test_frames_that_come_while_others_are_written_are_all_read(
    worker: Worker, router: Router
) -> None:
    """A write may swallow the socket's word of them."""
    router.greet()
    done = threading.Event()
    seen: list[object] = []

    room = threading.Semaphore(64)  # frames unread: else one who reads slowly never says more

    def write() -> None:
        while not done.is_set():
            if room.acquire(timeout=0.05):
                worker.thread.send(router.link.me, Frame(step=1))
                worker.thread.flush()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(2000):
            router.say(Cancel("r", number))
            while router.socket.poll(0):
                router.socket.recv_multipart()
                room.release()
            while number % 50 == 49 and len(seen) <= number:  # nothing else tells of the last one
                item = worker.next(router.link.me)
                if isinstance(item, FromRouter):
                    seen.append(item.message)
    finally:
        done.set()
        writer.join()
    assert seen == [Cancel("r", number) for number in range(2000)]
