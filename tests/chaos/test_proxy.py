"""The proxy itself: all passes in order while nothing is asked of it, and each fault is seen."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator

import pytest
import zmq
from tests.chaos.proxy import ADVERTISED, LISTENED, Proxy
from tests.chaos.schedule import LINK_KINDS, Kind, make_schedule
from tests.waiting import wait_for

from tandem.cli.ports import free_ports

COUNT = 400
SECONDS = 20.0


class Pipe:
    """A DEALER that reaches a ROUTER by way of a proxy."""

    def __init__(self) -> None:
        self.control, self.data = free_ports(2)
        self.proxy = Proxy(self.control, self.data, seed=5)
        self.proxy.start()
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.dealer = self.context.socket(zmq.DEALER)
        self.router.bind(f"tcp://{LISTENED}:{self.control}")
        self.dealer.connect(f"tcp://{ADVERTISED}:{self.control}")
        self._marks = (b"mark %d" % number for number in itertools.count())
        self._passed: set[bytes] = set()

    def close(self) -> None:
        """All of it."""
        self.context.destroy(linger=0)
        self.proxy.stop()

    def hurt(self, kind: Kind) -> None:
        """For longer than any test takes."""
        self.proxy.disturb(kind, 60.0)
        wait_for(lambda: self.proxy._kind is kind)

    def sent(self, count: int = COUNT) -> list[bytes]:
        """What of so many numbered messages arrives."""
        for number in range(count):
            self.dealer.send_multipart([b"header", b"%06d" % number])
        # One that is held comes behind the next one, which may be the first mark.
        return self._up_to(next(self._marks)) + self._up_to(next(self._marks))

    def next(self, seconds: float = SECONDS) -> list[bytes] | None:
        """The next message without its sender, if one comes; marks that came twice are none."""
        while self.router.poll(int(1000 * seconds)):
            _, *message = self.router.recv_multipart()
            if message[-1] not in self._passed:
                return message
        return None

    def _up_to(self, mark: bytes) -> list[bytes]:
        """What arrives before a mark, which is sent until it arrives: no silence, however long,
        says that nothing comes any more."""
        got: list[bytes] = []

        def came() -> bool:
            self.dealer.send_multipart([b"header", mark])
            while message := self.next(0.05):
                if message[-1] == mark:
                    self._passed.add(mark)
                    return True
                got.append(message[-1])
            return False

        wait_for(came, seen=lambda: got)
        return got


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """Ended with the test."""
    made = Pipe()
    yield made
    made.close()


RIGHT = [b"%06d" % number for number in range(COUNT)]


def test_without_a_fault_all_passes(pipe: Pipe) -> None:
    """Every message, once and in order, of any size."""
    assert pipe.sent() == RIGHT
    pipe.dealer.send_multipart([b"x" * 300, b"y" * 100_000])
    assert pipe.next() == [b"x" * 300, b"y" * 100_000]
    assert not any(pipe.proxy.hurt.values())


def test_messages_are_lost_repeated_and_reordered(pipe: Pipe) -> None:
    """Each fault does what it says, to some."""
    pipe.sent(1)
    pipe.hurt(Kind.DROP)
    lost = pipe.sent()
    assert 0 < len(lost) < COUNT
    assert lost == sorted(set(lost))
    pipe.hurt(Kind.REPEAT)
    twice = pipe.sent()
    assert sorted(set(twice)) == RIGHT
    assert len(twice) > COUNT
    pipe.hurt(Kind.REORDER)
    mixed = pipe.sent()
    assert mixed != sorted(mixed)
    assert set(mixed) == set(RIGHT)
    assert all(pipe.proxy.hurt[kind] for kind in (Kind.DROP, Kind.REPEAT, Kind.REORDER))


def test_bits_flip_and_connections_are_cut(pipe: Pipe) -> None:
    """Of a stream, too: as long as it was, and not the same; then it ends early."""
    sent = bytes(range(256)) * 4096
    for kind in (Kind.CORRUPT, Kind.CUT):
        pipe.hurt(kind)
        with socket.create_server((LISTENED, pipe.data)) as server:
            caller = socket.create_connection((ADVERTISED, pipe.data), timeout=SECONDS)
            there, _ = server.accept()
            there.settimeout(SECONDS)
            writing = threading.Thread(target=_write, args=(caller, sent))
            writing.start()
            got = b""
            while data := there.recv(1 << 16):
                got += data
            writing.join(SECONDS)
            there.close()
        if kind is Kind.CORRUPT:
            assert len(got) == len(sent)
            assert got != sent
        else:
            assert len(got) < len(sent)


def _write(caller: socket.socket, data: bytes) -> None:
    with caller:
        for start in range(0, len(data), 4096):
            try:
                caller.sendall(data[start : start + 4096])
            except OSError:
                return


def test_faults_of_links_are_in_a_schedule_that_asks_for_them() -> None:
    """And change neither its requests nor those of a schedule that does not."""
    plain = make_schedule(7, 500)
    linked = make_schedule(7, 500, kinds=(Kind.KILL, *LINK_KINDS), every=10)
    assert (linked.asks, linked.questions) == (plain.asks, plain.questions)
    assert {fault.kind for fault in linked.faults} == {Kind.KILL, *LINK_KINDS}
    assert {fault.role for fault in linked.faults if fault.kind in LINK_KINDS} == {"link"}
    assert not {fault.kind for fault in plain.faults} & set(LINK_KINDS)
