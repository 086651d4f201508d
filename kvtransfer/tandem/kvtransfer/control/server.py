"""P's end of the control plane: one ROUTER socket that consumers connect to.

A session is made by a HELLO that has the right version, fingerprint and secret, and ends with the
first frame that does not follow. Frames without a session are answered RESET, so that a consumer
of this process's predecessor learns at once that its peer is gone.
"""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.control.channel import Channel, control_socket, mac, same_mac
from tandem.kvtransfer.control.mail import (
    Drop,
    FromPeer,
    LinkDown,
    LinkNumber,
    LinkUp,
    Say,
    SetPeers,
    ToMover,
)
from tandem.kvtransfer.control.session import Session
from tandem.kvtransfer.errors import AddressInUse
from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.handoff.messages import (
    HANDOFF_VERSION,
    Hello,
    Message,
    Reset,
    ToProducer,
    TurnedAway,
    Welcome,
    decode_to_producer,
    encode,
)
from tandem.kvtransfer.metrics import HandoffMetrics
from tandem.kvtransfer.progress import ProgressBoard
from tandem.link.curve import CurveGuard
from tandem.link.liveness import Liveness
from tandem.link.sockets import MAX_LINKS
from tandem.protocol.errors import WireError
from tandem.protocol.ids import NOBODY, Incarnation
from tandem.protocol.link import Header, Link, read_header
from tandem.protocol.messages import Beat

logger = logging.getLogger(__name__)

_BATCH = 512


@dataclass(slots=True)
class _Consumer:
    """One connection with a session."""

    identity: bytes
    number: LinkNumber
    session: Session
    liveness: Liveness


class ControlServer(Channel):
    """Binds on construction; ``endpoint`` says where."""

    name = "kv-control-p"

    def __init__(
        self,
        config: KVTransferConfig,
        incarnation: Incarnation,
        fingerprint: str,
        *,
        board: ProgressBoard,
        metrics: HandoffMetrics,
        deliver: Callable[[ToMover], None],
        welcome: Callable[[tuple[str, ...]], Welcome | None],
        guard: CurveGuard | None = None,
    ) -> None:
        super().__init__(
            config,
            incarnation,
            fingerprint,
            board=board,
            metrics=metrics,
            deliver=deliver,
            guard=guard,
        )
        self._welcome = welcome
        self._numbers = itertools.count(1)
        self._by_identity: dict[bytes, _Consumer] = {}
        self._by_number: dict[LinkNumber, _Consumer] = {}
        self._socket = control_socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if guard is not None:
            guard.serve(self._socket, "decode")
        self.endpoint = self._bind()
        self._poller.register(self._socket, zmq.POLLIN)

    def _bind(self) -> str:
        host, port = self.config.kv_control_host, self.config.kv_control_port
        where = f"[{host}]" if ":" in host else host
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.bind(f"tcp://{where}:{port or '*'}")
        except zmq.ZMQError as error:
            self._socket.close()
            if self.guard is None:
                self._context.destroy(linger=0)
            self._inbox.close()
            raise AddressInUse(f"KV control socket {where}:{port}: {error}") from error
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        return f"{self.config.kv_advertise_host or _reachable(where)}:{bound}"

    def on_ready(self, ready: dict[object, int], now: Millis) -> None:
        """Read what there is, a batch at most, so that beats keep their time."""
        for _ in range(_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frames(frames, now)

    def on_item(self, item: Say | Drop | SetPeers, now: Millis) -> None:
        """Say something on a link, or drop it."""
        if isinstance(item, SetPeers):
            return
        consumer = self._by_number.get(item.link)
        if consumer is None:
            return
        if isinstance(item, Say):
            self._send(consumer, item.message)
        else:
            self._send(consumer, Reset(item.reason[:500]))
            self._drop(consumer, item.reason)

    def on_tick(self, now: Millis, late: float = 0.0) -> None:
        """Beat every consumer; drop those that are silent or stand still."""
        beat = self.beat()
        for consumer in list(self._by_number.values()):
            consumer.liveness.overslept(late)
            fault = consumer.liveness.overdue(now / 1000)
            if fault is not None:
                self._send(consumer, Reset(fault))
                self._drop(consumer, fault)
            else:
                self._send(consumer, beat)

    def close_sockets(self) -> None:
        """Tell the consumers, so that they need not wait for beats."""
        for consumer in list(self._by_number.values()):
            self._send(consumer, Reset("the worker ends"))
        self._socket.close(linger=100)

    def _on_frames(self, frames: list[bytes], now: Millis) -> None:
        if len(frames) != 3:
            self.garbage(f"{len(frames)} frames")
            return
        identity, head, payload = frames
        consumer = self._by_identity.get(identity)
        try:
            header, message = read_header(head), decode_to_producer(payload)
        except WireError as error:
            self.garbage(str(error))
            return
        if isinstance(message, Hello) and header.sequence == 0:
            self._on_hello(identity, header, message, now)
        elif consumer is None:
            self._say_reset(identity, header.source, "no such link")
        elif not consumer.session.accept(header):
            self._drop(consumer, "a frame is missing or misdirected")
            self._say_reset(identity, header.source, "a frame is missing or misdirected")
        else:
            consumer.liveness.heard(now / 1000)
            self._on_message(consumer, message, now)

    def _on_message(self, consumer: _Consumer, message: ToProducer, now: Millis) -> None:
        if isinstance(message, Beat):
            consumer.liveness.progress(now / 1000, message)
        elif isinstance(message, Reset):
            self._drop(consumer, f"the consumer reset it: {message.reason}")
        elif not isinstance(message, Hello):
            self._deliver(FromPeer(consumer.session.peer, consumer.number, message))

    def _on_hello(self, identity: bytes, header: Header, hello: Hello, now: Millis) -> None:
        session = Session(self.me)
        refusal = self._why_not(hello, header)
        welcome = None if refusal is not None else self._welcome(hello.connectors)
        if refusal is None and welcome is None:
            refusal = f"no transport in common: {', '.join(hello.connectors)}"
        if not session.accept(header):
            self.garbage("HELLO for another process")
            self._say_reset(identity, header.source, "HELLO for another process")
            return
        number = LinkNumber(next(self._numbers))
        consumer = _Consumer(identity, number, session, Liveness(self.times, now / 1000))
        if welcome is None:
            self.metrics.turned_away.inc()
            self._send_raw(identity, session.seal(), TurnedAway((refusal or "")[:500]))
            return
        for known in list(self._by_number.values()):
            if known.identity == identity or known.session.peer == header.source:
                self._drop(known, "made again")
        self._by_identity[identity] = consumer
        self._by_number[number] = consumer
        self.metrics.links.labels("producer").set(len(self._by_number))
        self._deliver(LinkUp(header.source, number, welcome.connector))
        self._send(consumer, welcome)

    def _why_not(self, hello: Hello, header: Header) -> str | None:
        if hello.version != HANDOFF_VERSION:
            return f"version {hello.version} of the hand-off; here it is {HANDOFF_VERSION}"
        if not same_mac(hello.auth, mac(self.config.kv_secret, header.source, hello.fingerprint)):
            return "wrong secret"
        if hello.fingerprint != self.fingerprint:
            return f"fingerprint {hello.fingerprint}; here it is {self.fingerprint}"
        if header.source == NOBODY or len(self._by_number) >= MAX_LINKS:
            return "no more links"
        return None

    def _send(self, consumer: _Consumer, message: Message) -> None:
        if not self._send_raw(consumer.identity, consumer.session.seal(), message):
            self._drop(consumer, "the connection is closed or full")

    def _send_raw(self, identity: bytes, header: bytes, message: Message) -> bool:
        try:
            self._socket.send_multipart([identity, header, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _say_reset(self, identity: bytes, source: Incarnation, reason: str) -> None:
        self._send_raw(identity, Link(self.me, source).seal(), Reset(reason))

    def _drop(self, consumer: _Consumer, reason: str) -> None:
        if self._by_number.pop(consumer.number, None) is None:
            return
        self._by_identity.pop(consumer.identity, None)
        self.metrics.links.labels("producer").set(len(self._by_number))
        self.metrics.links_lost.labels("producer").inc()
        logger.info("link of consumer %s ends: %s", consumer.session.peer.hex()[:8], reason)
        self._deliver(LinkDown(consumer.session.peer, consumer.number, reason))


def _reachable(host: str) -> str:
    """An address for peers: a wildcard is none, so this machine's own is taken."""
    if host not in ("0.0.0.0", "[::]", "*"):
        return host
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
