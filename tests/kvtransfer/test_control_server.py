"""P's end of the control plane, driven by hand over a real socket in virtual time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry
from tests.hand_link import HandLink
from tests.kvtransfer.builders import make_config, make_key
from tests.waiting import wait_for

from tandem.kvtransfer.control.mail import Drop, FromPeer, LinkDown, LinkUp, SendMessage, SetPeers
from tandem.kvtransfer.control.server import ControlServer
from tandem.kvtransfer.errors import AddressInUse
from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.handoff.messages import (
    Gone,
    GoneReason,
    Message,
    Open,
    ProducerCard,
    decode_to_consumer,
)
from tandem.kvtransfer.metrics import metrics_of
from tandem.kvtransfer.waiting import ProgressBoard
from tandem.link.liveness import LinkTimes
from tandem.link.session import Terms
from tandem.link.sockets import MAX_LINKS
from tandem.protocol.card import HANDOFF_VERSION
from tandem.protocol.ids import NO_INCARNATION, Incarnation, new_incarnation
from tandem.protocol.link import read_header
from tandem.protocol.messages import Beat, Reset, Welcome, encode

NOW = Millis(1000)
CARD = ProducerCard("tcp", b"", 1, 1, 1)


class Server:
    """A server whose thread never starts: the test calls what the thread would."""

    def __init__(self, **config: object) -> None:
        self.registry = CollectorRegistry()
        self.told: list[Any] = []
        self.me = new_incarnation()
        self.server = ControlServer(
            make_config(**config),
            self.me,
            "print",
            board=ProgressBoard(),
            metrics=metrics_of(self.registry),
            deliver=self.told.append,
            welcome=lambda connectors: (
                CARD if "tcp" in connectors else f"no transport in common: {connectors[0]}"
            ),
        )

    def read(self, now: Millis = NOW) -> None:
        poller = zmq.Poller()
        poller.register(self.server._socket, zmq.POLLIN)
        assert poller.poll(5000), "no frame came"
        time.sleep(0.02)
        self.server.on_ready({}, now)

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


class Dealer:
    def __init__(self, server: Server, me: Incarnation | None = None) -> None:
        self.server = server
        self.link = HandLink(me or new_incarnation(), server.me)
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://{server.server.endpoint}")

    def send_message(self, message: Message) -> None:
        self.socket.send_multipart([self.link.seal(), encode(message)])
        self.server.read()

    def hello(self, **changes: Any) -> Any:
        fields: dict[str, Any] = {"version": HANDOFF_VERSION, "fingerprint": "print"}
        fields |= {"connectors": ("tcp",), "secret": ""} | changes
        connectors = fields.pop("connectors")
        self.send_message(
            Terms(self.link.me, "hand-off", times=LinkTimes(), **fields).hello(connectors)
        )
        return self.receive()

    def receive(self) -> Any:
        assert self.socket.poll(5000), "no answer came"
        head, payload = self.socket.recv_multipart()
        read_header(head)
        return decode_to_consumer(payload)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server on a port of its own."""
    made = Server()
    yield made
    made.server.stop()


@pytest.fixture
def dealer(server: Server) -> Iterator[Dealer]:
    made = Dealer(server)
    yield made
    made.socket.close()


def links(server: Server) -> list[Any]:
    """Links that stand, as the transfer thread was told."""
    up = [each for each in server.told if isinstance(each, LinkUp)]
    down = {each.link for each in server.told if isinstance(each, LinkDown)}
    return [each for each in up if each.link not in down]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": HANDOFF_VERSION + 1}, "version"),
        ({"secret": "other"}, "secret"),
        ({"fingerprint": "other"}, "fingerprint other"),
        ({"connectors": ("memory",)}, "no transport in common: memory"),
    ],
)
def test_a_wrong_hello_is_turned_away(
    server: Server, dealer: Dealer, changes: dict[str, Any], words: str
) -> None:
    answer = dealer.hello(**changes)

    assert isinstance(answer, Reset)
    assert words in answer.reason
    assert links(server) == []
    assert server.count("tandem:kv_links_refused_total") == 1


def test_nobody_and_too_many_are_turned_away(
    server: Server, dealer: Dealer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incarnation of zeros is no process; links are bounded."""
    nobody = Dealer(server, NO_INCARNATION)
    assert isinstance(nobody.hello(), Reset)
    nobody.socket.close()
    monkeypatch.setattr("tandem.link.listener.MAX_LINKS", 0)
    assert isinstance(dealer.hello(), Reset)
    assert MAX_LINKS >= 4096


def test_what_comes_on_a_link_is_delivered(server: Server, dealer: Dealer) -> None:
    """Messages go to the transfer thread with their link; beats are kept here."""
    assert isinstance(dealer.hello(), Welcome)
    (link,) = links(server)
    dealer.send_message(Open(make_key("a"), 5))
    dealer.send_message(Beat(1, 1, has_work=False))

    assert server.told[-1] == FromPeer(dealer.link.me, link.link, Open(make_key("a"), 5))


def test_who_says_more_than_the_transfer_thread_takes_is_dropped(
    server: Server, dealer: Dealer
) -> None:
    """What a peer says does not fill the memory; that its link ended is told all the same."""
    room = iter([True, True, False])
    server.server._offer = lambda said: next(room)
    dealer.hello()
    for name in "abc":
        dealer.send_message(Open(make_key(name), 5))

    answer = dealer.receive()
    assert isinstance(answer, Reset)
    assert "more than is accepted" in answer.reason
    assert links(server) == []


def test_a_second_hello_replaces_the_link(server: Server, dealer: Dealer) -> None:
    """The same process on another connection: the old link ends first."""
    dealer.hello()
    (first,) = links(server)
    again = Dealer(server, dealer.link.me)
    assert isinstance(again.hello(), Welcome)
    again.socket.close()

    (second,) = links(server)
    assert second.link != first.link


def test_a_hello_for_a_predecessor_is_answered_reset(server: Server, dealer: Dealer) -> None:
    """The address is the same, the process another."""
    dealer.link = HandLink(dealer.link.me, new_incarnation())
    assert isinstance(dealer.hello(), Reset)
    assert links(server) == []


def test_frames_that_do_not_follow_end_the_link(server: Server, dealer: Dealer) -> None:
    """A gap: RESET, and the transfer thread hears of it."""
    dealer.hello()
    dealer.link.seal()
    dealer.send_message(Open(make_key("a"), 5))

    assert isinstance(dealer.receive(), Reset)
    assert links(server) == []
    dealer.send_message(Open(make_key("a"), 5))
    assert isinstance(dealer.receive(), Reset)


def test_a_consumer_may_end_its_link(server: Server, dealer: Dealer) -> None:
    """RESET from it; what is said afterwards goes nowhere."""
    dealer.hello()
    (link,) = links(server)
    dealer.send_message(Reset("I go"))
    assert links(server) == []
    server.server.on_item(SendMessage(link.link, Gone(make_key("a"), GoneReason.UNKNOWN)), NOW)
    assert not dealer.socket.poll(100)


def test_the_transfer_thread_speaks_and_drops(server: Server, dealer: Dealer) -> None:
    """SendMessage reaches the consumer, Drop tells it why; peers are nothing to a server."""
    dealer.hello()
    (link,) = links(server)
    gone = Gone(make_key("a"), GoneReason.UNKNOWN)
    server.server.on_item(SetPeers(()), NOW)
    server.server.on_item(SendMessage(link.link, gone), NOW)
    assert dealer.receive() == gone
    server.server.on_item(Drop(link.link, "enough", 0), NOW)

    answer = dealer.receive()
    assert isinstance(answer, Reset)
    assert answer.reason == "enough"
    assert links(server) == []


def test_the_silent_are_dropped_and_the_others_beaten(server: Server, dealer: Dealer) -> None:
    """After the timeout, with a RESET that says so."""
    dealer.hello()
    server.server.on_tick(Millis(NOW + 100))
    assert isinstance(dealer.receive(), Beat)
    server.server.on_tick(Millis(NOW + 60_000))

    answer = dealer.receive()
    assert isinstance(answer, Reset)
    assert "silent" in answer.reason
    assert links(server) == []


def test_a_connection_that_is_gone_ends_its_link(server: Server, dealer: Dealer) -> None:
    """A frame that cannot be sent is a lost frame."""
    dealer.hello()
    (link,) = links(server)
    dealer.socket.close()

    def gone() -> bool:
        server.server.on_item(SendMessage(link.link, Gone(make_key("a"), GoneReason.UNKNOWN)), NOW)
        return links(server) == []

    wait_for(gone, every=0.02)


def test_a_taken_port_is_named() -> None:
    first = Server()
    port = int(first.server.endpoint.rpartition(":")[2])
    try:
        with pytest.raises(AddressInUse, match=str(port)):
            Server(kv_control_port=port)
    finally:
        first.server.stop()


def test_a_wildcard_is_advertised_as_an_address() -> None:
    """Peers cannot call 0.0.0.0; what is configured goes first."""
    wild = Server(kv_control_host="0.0.0.0")
    named = Server(kv_control_host="0.0.0.0", kv_advertise_host="10.0.0.7")
    try:
        assert not wild.server.endpoint.startswith("0.0.0.0")
        assert named.server.endpoint.startswith("10.0.0.7:")
    finally:
        wild.server.stop()
        named.server.stop()
