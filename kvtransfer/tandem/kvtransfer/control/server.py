"""P's end of the control plane: one ROUTER socket that consumers connect to.

Frames without a link are answered RESET, so that consumers of an earlier process reconnect.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

import zmq

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.control.channel import Channel, control_socket
from tandem.kvtransfer.control.mail import (
    Drop,
    FromPeer,
    LinkDown,
    LinkNumber,
    LinkUp,
    MessageTooLong,
    SendMessage,
    SetPeers,
    ToMover,
)
from tandem.kvtransfer.errors import AddressInUse
from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.handoff.messages import (
    MAX_MESSAGE_BYTES,
    ForProducer,
    KeyedToConsumer,
    Message,
    ProducerCard,
    decode_to_producer,
)
from tandem.kvtransfer.metrics import HandoffMetrics
from tandem.kvtransfer.waiting import ProgressBoard
from tandem.link.curve import CurveGuard
from tandem.link.listener import Link, Listener
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import Hello, Reset, Welcome, encode

logger = logging.getLogger(__name__)

_BATCH = 512


class ControlServer(Channel):
    """P's end of the control plane. Binds on construction; ``endpoint`` is the address."""

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
        offer: Callable[[FromPeer], bool] | None = None,
        welcome: Callable[[tuple[str, ...]], ProducerCard | str],
        guard: CurveGuard | None = None,
    ) -> None:
        super().__init__(
            config,
            incarnation,
            fingerprint,
            board=board,
            metrics=metrics,
            deliver=deliver,
            offer=offer,
            guard=guard,
        )
        self._welcome = welcome
        self._listener = Listener(self.terms, decode_to_producer, self)
        self._links: dict[LinkNumber, Link] = {}
        self._socket = control_socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if guard is not None:
            guard.serve(self._socket, "decode", *(("prefill",) if config.kv_pull_peers else ()))
        self.endpoint = self._bind()
        self.watch(self._socket)

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
        """Read at most a batch, so that beats are sent in time."""
        for _ in range(_BATCH):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            frame = self._listener.read(parts)
            if frame is not None:
                self._listener.take(frame, now / 1000)

    def on_item(self, item: SendMessage | Drop | SetPeers, now: Millis) -> None:
        if isinstance(item, SetPeers):
            return
        link = self._links.get(item.link)
        if link is None:
            return
        if isinstance(item, SendMessage):
            self._send_message(link, item.message)
        else:
            self._listener.drop(link, item.reason)

    def _send_message(self, link: Link, message: Message) -> None:
        data = encode(message)
        if len(data) > MAX_MESSAGE_BYTES and isinstance(message, KeyedToConsumer):
            logger.error(
                "%s of %s is %d bytes, a peer reads %d: its hand-off ends",
                *(type(message).__name__, message.key, len(data), MAX_MESSAGE_BYTES),
            )
            self._deliver(MessageTooLong(link.peer, LinkNumber(link.number), message.key))
        else:
            self._listener.send_message(link, data)

    def on_tick(self, now: Millis, late: float = 0.0) -> None:
        self._listener.drop_silent(now / 1000, late)
        self._listener.send_to_all(encode(self.beat()))

    def close_sockets(self) -> None:
        self._listener.send_to_all(encode(Reset("the worker ends")))
        for number, link in self._links.items():
            self._deliver(LinkDown(link.peer, number, self.problem or "the worker ends"))
        self._socket.close(linger=100)

    # Methods of the listener's host.

    def write(self, parts: list[bytes]) -> bool:
        """Send without blocking; return False if the socket does not take it."""
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def welcome(self, hello: Hello) -> Welcome[ProducerCard] | str:
        """Return WELCOME with the card of a common transport, or why there is none."""
        card = self._welcome(hello.connectors)
        return card if isinstance(card, str) else Welcome(card)

    def up(self, link: Link, welcome: Welcome[ProducerCard]) -> None:
        number = LinkNumber(link.number)
        self._links[number] = link
        self.metrics.links.labels("producer").set(len(self._links))
        self._deliver(LinkUp(link.peer, number, welcome.card.connector))

    def deliver(self, link: Link, message: ForProducer) -> bool:
        return self.from_peer(FromPeer(link.peer, LinkNumber(link.number), message))

    def down(self, link: Link, reason: str) -> None:
        number = LinkNumber(link.number)
        del self._links[number]
        self.metrics.links.labels("producer").set(len(self._links))
        self.metrics.links_lost.labels("producer").inc()
        logger.info("link of consumer %s ends: %s", link.peer.hex()[:8], reason)
        self._deliver(LinkDown(link.peer, number, reason))

    def dropped(self, kind: str, words: str) -> None:
        if kind == "garbage":
            self.garbage()
        elif kind == "refused":
            self.metrics.turned_away.inc()
        logger.debug("%s: %s", kind, words)


def _reachable(host: str) -> str:
    if host not in ("0.0.0.0", "[::]", "*"):
        return host
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
