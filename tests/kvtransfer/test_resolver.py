"""Names are looked up beside everything else: one that hangs costs its own link and no other's."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq
from tests.kvtransfer.builders import Consumer, Producer
from tests.waiting import wait_for

from tandem.kvtransfer.control import client as client_module
from tandem.kvtransfer.control.mail import SetPeers
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.mover.reads import slot_extent
from tandem.kvtransfer.resolver import MAX_LOOKUPS, Address, Lookup, Resolver, first_address
from tandem.kvtransfer.transports.base import Extent, Progress, Ticket
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.protocol.ids import Incarnation, new_incarnation

BYTES = 64
_LAST_ENDPOINT = zmq.LAST_ENDPOINT


class NameServer:
    """Answers when it is let; every name is this machine."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.threads: set[str] = set()

    def __call__(self, host: str, port: int) -> Address:
        self.threads.add(threading.current_thread().name)
        assert self.may_answer.wait(30)
        return first_address("127.0.0.1", port)


@pytest.fixture
def server() -> Iterator[NameServer]:
    """A name server that hangs until the test lets it answer."""
    made = NameServer()
    yield made
    made.may_answer.set()


def slot_of(slot: int) -> Extent:
    """All of a peer's first slot, for this one."""
    return slot_extent(slot, 0, BYTES, slot_bytes=BYTES, remote_slot_bytes=BYTES)


class Reader:
    """A consumer's transport, and producers for it."""

    def __init__(self, resolver: Resolver) -> None:
        self.memory = SlotMemory(4, BYTES)
        self.transport = self._made(resolver)
        self.transport.receive(self.memory)
        self.producers: list[TcpTransport] = []

    def _made(self, resolver: Resolver) -> TcpTransport:
        return TcpTransport(new_incarnation(), host="127.0.0.1", resolver=resolver)

    def meet(self, host: str) -> Incarnation:
        peer = new_incarnation()
        producer = TcpTransport(peer, host="127.0.0.1")
        card = producer.serve(SlotMemory(1, BYTES))
        self.producers.append(producer)
        self.transport.connect(peer, host, card)
        return peer

    def outcome(self, ticket: Ticket) -> Progress:

        def ended() -> Progress | None:
            self.transport.advance()
            progress = self.transport.poll(ticket)
            return None if progress is Progress.PENDING else progress

        return wait_for(ended, every=0.001)

    def stop(self) -> None:
        for each in (self.transport, *self.producers):
            each.stop()


@pytest.fixture
def reader() -> Iterator[Callable[[Resolver], Reader]]:
    """Make a reader; it is closed at the end."""
    made: list[Reader] = []

    def make(resolver: Resolver) -> Reader:
        made.append(Reader(resolver))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def test_a_name_that_hangs_does_not_hold_up_other_reads(server, reader):
    """The thread that reads goes on with another peer, and asks no name server itself."""
    d = reader(Resolver(server))
    slow, fast = d.meet("slow.example"), d.meet("127.0.0.1")
    late = d.transport.read(slow, [slot_of(0)])
    assert d.outcome(d.transport.read(fast, [slot_of(1)])) is Progress.DONE
    d.transport.advance()
    assert d.transport.poll(late) is Progress.PENDING
    server.may_answer.set()
    assert d.outcome(late) is Progress.DONE
    assert threading.current_thread().name not in server.threads


def test_a_name_without_an_answer_fails_its_reads_in_time(server, reader):
    """There is a deadline, after which the link is broken like any other."""
    d = reader(Resolver(server, seconds=0.0))
    peer = d.meet("slow.example")
    for slot in (0, 1):
        assert d.outcome(d.transport.read(peer, [slot_of(slot)])) is Progress.FAILED


def test_an_unknown_name_fails_its_reads(reader):
    """What the name server says is what the link dies of."""

    def nobody(host: str, port: int) -> Address:
        raise OSError(f"no such host: {host}")

    d = reader(Resolver(nobody))
    assert d.outcome(d.transport.read(d.meet("x.example"), [slot_of(0)])) is Progress.FAILED


def test_names_that_hang_take_a_bounded_number_of_threads(server):
    """One for each name, and so many in all; who asks beyond that is told at once."""
    resolver = Resolver(server)
    asked = [resolver.ask(f"host{n}.example", 1) for n in range(MAX_LOOKUPS)]
    for again in (resolver.ask("host0.example", 1), resolver.ask("more.example", 1)):
        with pytest.raises(TransportError, match="too many"):
            again.poll()
    server.may_answer.set()
    assert all(_answer(each)[1] for each in asked)
    assert _answer(resolver.ask("more.example", 1))


def _answer(lookup: Lookup) -> Address:
    return wait_for(lookup.poll, every=0.001)


def test_links_wait_for_a_name_without_holding_up_others(server, client):
    """ZMQ gets numbers: it would look names up in the thread that moves all frames."""
    client._resolver = Resolver(server)
    client.post(SetPeers(("slow.example:9", "127.0.0.1:9")))
    client._turn()
    slow, fast = client._producers["slow.example:9"], client._producers["127.0.0.1:9"]
    assert slow.link is None
    assert fast.link is not None
    server.may_answer.set()
    assert slow.lookup is not None
    _answer(slow.lookup)
    slow.retry_at = Millis(0)
    client._turn()
    assert slow.link is not None
    assert slow.link.socket.getsockopt_string(_LAST_ENDPOINT) == "tcp://127.0.0.1:9"


def test_a_link_is_made_again_when_it_is_due(client):
    """Not with the next beat: until then the thread would ask itself in a loop without a pause."""
    client.post(SetPeers(("127.0.0.1:9",)))
    client._turn()
    producer = client._producers["127.0.0.1:9"]
    client._close(producer)
    producer.retry_at = Millis(0)
    client._next_beat = Millis(1 << 60)
    client._turn()
    assert producer.link is not None


def test_a_link_that_gets_no_socket_costs_no_other(client, monkeypatch):
    """Out of descriptors: the control thread goes on, and tries that one again."""

    def none_left(context: object, kind: int) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    client.post(SetPeers(("127.0.0.1:9",)))
    client._turn()
    client.post(SetPeers(("127.0.0.1:9", "127.0.0.1:10")))
    monkeypatch.setattr(client_module, "control_socket", none_left)
    assert client._turn()
    stands, lacks = client._producers["127.0.0.1:9"], client._producers["127.0.0.1:10"]
    assert stands.link is not None
    assert lacks.link is None
    assert lacks.retry_at > 0
    monkeypatch.undo()
    lacks.retry_at = Millis(0)
    client._turn()
    assert lacks.link is not None


NO_ADDRESSES = ("", "nonsense", "a.example:five", f"127.0.0.1:{10**30}", "a..b:5")


def test_an_endpoint_that_is_no_address_costs_no_other(client):
    """Cards of workers are passed on as they are: each such peer is a link that is not made."""
    client.post(SetPeers((*NO_ADDRESSES, "127.0.0.1:9")))
    client._turn()
    lacking = [client._producers[each] for each in NO_ADDRESSES]
    wait_for(lambda: client._turn() and all(each.failures or not each.lookup for each in lacking))
    assert client._producers["127.0.0.1:9"].link is not None
    assert all(each.link is None and each.retry_at > 0 for each in lacking)


def test_a_worker_goes_on_beside_a_peer_that_has_no_address(workers):
    """Its other links come up, and neither of its threads ends."""
    producer, consumer = workers(Producer), workers(Consumer)
    known = dict.fromkeys(NO_ADDRESSES, new_incarnation())
    consumer.service.set_peers({**known, producer.service.control: producer.incarnation})
    consumer.until(lambda: consumer.service.peer_up(producer.incarnation))
    assert consumer.service.ended() is None
