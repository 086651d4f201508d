"""Hand-off links of a fleet: more than ZMQ's and the kernel's defaults allow, on either end."""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry
from tests.kvtransfer.builders import make_config
from tests.kvtransfer.test_control_server import Dealer, Server, links
from tests.many_links import NUM_LINKS, DecodeBatch, resident_kib
from tests.waiting import wait_for

from tandem.kvtransfer.control.client import ControlClient
from tandem.kvtransfer.control.mail import LinkUp, SetPeers
from tandem.kvtransfer.handoff.messages import ProducerCard, decode_to_producer
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.metrics import metrics_of
from tandem.kvtransfer.transports.tcp_server import TcpServer
from tandem.kvtransfer.waiting import ProgressBoard
from tandem.link.sockets import raise_descriptor_limit
from tandem.protocol.ids import Incarnation, new_incarnation
from tandem.protocol.messages import Hello, Welcome, encode


def welcome(me: Incarnation, payload: bytes) -> bytes | None:
    said = decode_to_producer(payload)
    return encode(Welcome(ProducerCard("tcp", b"", 1, 1, 1))) if isinstance(said, Hello) else None


@pytest.mark.timeout(180)
def test_a_decode_worker_keeps_links_to_four_hundred_prefill_workers():
    """Each takes three of ZMQ's sockets and five descriptors."""
    decode_batch = DecodeBatch(welcome)
    told: list[object] = []
    client = ControlClient(
        make_config(kv_connect_seconds=120.0, kv_beat_timeout=120.0),
        new_incarnation(),
        "print",
        board=ProgressBoard(),
        metrics=metrics_of(CollectorRegistry()),
        deliver=told.append,
    )
    before = resident_kib()
    client.start()
    try:
        client.post(SetPeers(tuple(decode_batch.endpoints)))
        wait_for(lambda: len(told) >= NUM_LINKS or client.problem, 150, seen=lambda: len(told))
        assert client.problem is None
        assert all(isinstance(each, LinkUp) for each in told)
        print(f"\n{(resident_kib() - before) / NUM_LINKS:.0f} KiB a link, both ends")
    finally:
        client.stop()
        decode_batch.stop()


@pytest.fixture
def server() -> Iterator[Server]:
    """A prefill worker's end, whose thread is the test's."""
    raise_descriptor_limit(8 * NUM_LINKS)
    made = Server()
    yield made
    made.server.stop()


@pytest.mark.full
@pytest.mark.timeout(180)
def test_a_prefill_worker_is_linked_to_four_hundred_decode_workers(server, monkeypatch):
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    monkeypatch.setattr(zmq.Context, "instance", lambda: context)
    dealers = []
    try:
        for _ in range(NUM_LINKS):
            dealers.append(Dealer(server))
            assert isinstance(dealers[-1].hello(), Welcome)
        assert len(links(server)) == NUM_LINKS
    finally:
        for dealer in dealers:
            dealer.socket.close(0)
        context.term()


class Door:
    """A listener of a process that has no descriptor left, until it has."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.full = True

    def fileno(self) -> int:
        return self.listener.fileno()

    def accept(self) -> Any:
        if self.full:
            raise OSError(errno.EMFILE, "too many open files")
        return self.listener.accept()

    def close(self) -> None:
        self.listener.close()


def test_who_cannot_be_let_in_does_not_take_the_thread_from_others():
    """Out of descriptors the data port rests, and lets the same caller in later."""
    server = TcpServer(
        SlotMemory(1, 64),
        new_incarnation(),
        host="127.0.0.1",
        first_port=0,
        num_ports=1,
        on_garbage=lambda: None,
    )
    door: Any = Door(server._listener)
    server._listener = door
    server._selector.register(door, selectors.EVENT_READ, None)
    with socket.create_connection(("127.0.0.1", server.port)):
        assert server._turn()
        assert door not in server._selector.get_map()
        door.full = False
        server._rests_until = 0.0
        assert server._turn()
        assert server._turn()
        assert len(server._peers) == 1
    server._selector.unregister(door)
    server.start()
    server.stop()
