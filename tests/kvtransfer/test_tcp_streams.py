"""A read of the tcp transport over several sockets: all bytes, or none that comes late."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from tests.waiting import wait_for

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.mover.reads import slot_extent
from tandem.kvtransfer.service.parts import make_transports
from tandem.kvtransfer.transports.base import Extent, Progress, Ticket
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.ids import Incarnation, new_incarnation

SIZE = (5 << 20) + 4096 * 3
STREAMS = 3
SLOTS = 3


class Ends:
    """P and D with random slots at P and empty ones at D."""

    def __init__(self) -> None:
        self.theirs, self.mine = SlotMemory(SLOTS, SIZE), SlotMemory(SLOTS, SIZE)
        self.theirs.rows.random_(1, 256)
        self.mine.rows.zero_()
        self.peer: Incarnation = new_incarnation()
        self.producer = TcpTransport(self.peer, host="127.0.0.1", streams=STREAMS)
        self.consumer = TcpTransport(new_incarnation(), host="127.0.0.1", streams=STREAMS)
        self.consumer.receive(self.mine)
        self.card = self.producer.serve(self.theirs)
        self.consumer.connect(self.peer, "127.0.0.1", self.card)

    def read(self, slot: int, remote: int, nbytes: int = SIZE) -> Ticket:
        return self.consumer.read(self.peer, [extent(slot, remote, nbytes)])

    def outcome(self, ticket: Ticket) -> Progress:

        def ended() -> Progress | None:
            self.consumer.advance()
            progress = self.consumer.poll(ticket)
            return None if progress is Progress.PENDING else progress

        return wait_for(ended, every=0.001)

    def stop(self) -> None:
        self.consumer.stop()
        self.producer.stop()


def extent(slot: int, remote: int, nbytes: int) -> Extent:
    return slot_extent(slot, remote, nbytes, slot_bytes=SIZE, remote_slot_bytes=SIZE)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.stop()


@pytest.mark.parametrize("nbytes", [1, 4096, (2 << 20) + 1, SIZE])
def test_stripes_of_a_read_make_the_whole(ends: Ends, nbytes: int):
    """Of any size, beside reads of other slots; no byte beyond it is written."""
    tickets = [ends.read(slot, (slot + 1) % SLOTS, nbytes) for slot in range(SLOTS)]
    assert [ends.outcome(each) for each in tickets] == [Progress.DONE] * SLOTS
    for slot in range(SLOTS):
        came, sent = ends.mine.rows[slot], ends.theirs.rows[(slot + 1) % SLOTS]
        assert torch.equal(came[:nbytes], sent[:nbytes])
        assert not came[nbytes:].any()


def test_bytes_move_by_every_socket_and_a_thread_for_each(ends: Ends):
    assert ends.outcome(ends.read(0, 0)) is Progress.DONE
    (link,) = ends.consumer._links.values()
    assert all(each.sock is not None for each in link.streams)
    server = ends.producer._server
    assert server is not None
    assert [each.num_peers for each in (server, *server._others)] == [1] * STREAMS
    threads = [each._thread for each in (server, *server._others)]
    threads += [each._thread for each in ends.consumer._receivers]
    assert len(set(threads)) == 2 * STREAMS
    assert set(threads) <= set(threading.enumerate())
    ends.stop()
    assert not any(each.is_alive() for each in threads)


def test_kernels_look_after_connections_at_both_ends(ends: Ends):
    """A way that is dead ends there though nobody sends anything, or sends without an answer."""
    assert ends.outcome(ends.read(0, 0)) is Progress.DONE
    (link,) = ends.consumer._links.values()
    server = ends.producer._server
    assert server is not None
    mine = [each.sock for each in link.streams]
    theirs = [each.sock for one in (server, *server._others) for each in one._peers]
    for sock in (*mine, *theirs):
        assert sock is not None
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


@pytest.mark.parametrize("how", ["one socket breaks", "the link is closed"])
def test_no_byte_lands_once_a_read_has_failed(ends: Ends, how: str):
    """Though other stripes were on their way: every socket is closed before it is said."""
    assert ends.outcome(ends.read(0, 0)) is Progress.DONE
    for _ in range(20):
        tickets = [ends.read(slot, slot) for slot in range(SLOTS)]
        (link,) = ends.consumer._links.values()
        if how == "the link is closed":
            ends.consumer.close(ends.peer)
        elif (sock := link.streams[1].sock) is not None:
            with suppress(OSError):  # one that does not stand yet: nothing breaks this time
                sock.shutdown(socket.SHUT_RDWR)
        outcomes = {ends.outcome(each) for each in tickets}
        assert outcomes <= {Progress.FAILED, Progress.DONE}
        if outcomes == {Progress.FAILED}:
            before = ends.mine.rows.clone()
            ends.mine.rows.fill_(0)
            threading.Event().wait(0.02)
            assert not ends.mine.rows.any(), before.shape
        ends.consumer.connect(ends.peer, "127.0.0.1", ends.card)
    assert ends.outcome(ends.read(1, 2)) is Progress.DONE


def test_a_broken_link_fails_what_is_asked_of_it_later(ends: Ends):
    assert ends.outcome(ends.read(0, 0)) is Progress.DONE
    ends.producer.stop()
    assert ends.outcome(ends.read(1, 1)) is Progress.FAILED
    assert ends.outcome(ends.read(1, 1)) is Progress.FAILED


def test_nobody_looks_after_a_stream_that_is_closed(ends: Ends):
    """Its thread keeps it until the link is made again, which may be never."""
    assert ends.outcome(ends.read(0, 0)) is Progress.DONE
    (link,) = ends.consumer._links.values()
    ends.producer.stop()
    assert ends.outcome(ends.read(1, 1)) is Progress.FAILED
    assert [each.wants() for each in link.streams] == [(None, 0)] * STREAMS


def test_the_transfer_thread_wakes_when_a_read_has_ended(ends: Ends):
    """By a descriptor, which rests again when it was looked at."""
    poller = select.poll()
    (number,) = ends.consumer.filenos()
    poller.register(number, select.POLLIN)
    assert not poller.poll(0)
    ticket = ends.read(0, 0)
    assert poller.poll(10_000)
    assert ends.outcome(ticket) is Progress.DONE
    ends.consumer.advance()
    assert not poller.poll(0)


@pytest.mark.parametrize("number", [0, 17])
def test_the_number_of_sockets_has_bounds(number: int):
    with pytest.raises(InvalidParameter, match="kv_tcp_streams"):
        KVTransferConfig(kv_tcp_streams=number)


@pytest.mark.parametrize(
    ("asked", "on_gpu", "count"), [(4, False, 4), (None, False, 2), (None, True, 4)]
)
def test_a_setting_says_how_many(asked: int | None, on_gpu: bool, count: int):
    """Of links of both roles; else it follows where blocks lie."""
    config = KVTransferConfig(kv_connector="tcp", kv_tcp_streams=asked)
    made = make_transports(config, new_incarnation(), "consumer", on_gpu=on_gpu)["tcp"]
    assert isinstance(made, TcpTransport)
    made.receive(SlotMemory(1, 4096))
    assert len(made._receivers) == count
    made.stop()
