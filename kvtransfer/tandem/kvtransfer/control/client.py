"""D's end of the control plane: a DEALER to every discovered prefill worker.

A broken link is closed with its socket, so that nothing of it reaches a successor; the next is made
after a growing pause.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from dataclasses import dataclass, field
from socket import AddressFamily

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.kvtransfer.control.channel import Channel, control_socket
from tandem.kvtransfer.control.mail import (
    Drop,
    FromPeer,
    LinkDown,
    LinkNumber,
    LinkUp,
    SendMessage,
    SetPeers,
)
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.handoff.messages import Message, ProducerCard, decode_to_consumer
from tandem.kvtransfer.resolver import Lookup, Resolver
from tandem.link.session import Session, Verdict
from tandem.link.sockets import HANDSHAKE_FAILED
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import (
    PeerHealth,
    Reset,
    Welcome,
    encode,
)

MAX_REMEMBERED = 256
"""Maximum incarnations that are down and not in ``keep`` but still reported, and most quarantined
ones; the longest known are forgotten first."""


class PeerBook:
    """Health by incarnation; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: dict[Incarnation, PeerHealth] = {}
        self._wanted: frozenset[Incarnation] | None = None
        """Peers of the last ``keep``; None before the first."""
        self._unnamed: dict[Incarnation, None] = {}
        """Last peers that are no longer in ``keep``."""
        self._quarantined_until: dict[Incarnation, Millis] = {}
        """Ends of quarantines, also of peers that may be named again."""

    def is_up(self, peer: Incarnation) -> bool:
        with self._lock:
            known = self._peers.get(peer)
        return known is not None and known.up

    def why_down(self, peer: Incarnation) -> str:
        with self._lock:
            known = self._peers.get(peer)
        return "no peer that is known" if known is None else known.reason

    def snapshot(self) -> tuple[PeerHealth, ...]:
        """Return all peers, the longest known first."""
        with self._lock:
            return tuple(self._peers.values())

    def keep(self, wanted: frozenset[Incarnation]) -> None:
        """Forget other peers that are down, except those met later. Callable from any thread."""
        with self._lock:
            former = (self._wanted or frozenset()) | self._peers.keys()
            self._unnamed.update(dict.fromkeys(former))
            self._wanted = wanted
            for each in [*(self._unnamed.keys() & wanted), *list(self._unnamed)[:-MAX_REMEMBERED]]:
                self._unnamed.pop(each, None)
            for each in self._down():
                if each not in wanted:
                    del self._peers[each]

    def mark(
        self,
        peer: Incarnation,
        *,
        up: bool,
        reason: str = "",
        transport: str = "",
        probed: float = 0.0,
    ) -> None:
        """Record a peer's state. ``probed`` is the pattern's rate in bytes/s. Transfer thread
        only."""
        with self._lock:
            self._peers[peer] = PeerHealth(peer, up, reason, transport, probed_bytes_per_s=probed)
            if not up and peer in self._unnamed:
                del self._peers[peer]
            strangers = [each for each in self._down() if each not in (self._wanted or ())]
            for each in strangers[: max(0, len(strangers) - MAX_REMEMBERED)]:
                del self._peers[each]

    def _down(self) -> list[Incarnation]:
        return [each for each, health in self._peers.items() if not health.up]

    def faster(self, peer: Incarnation, probed: float) -> None:
        """Record a faster pattern rate of a peer that is up, in bytes/s."""
        with self._lock:
            known = self._peers.get(peer)
            if known is not None and known.up:
                self._peers[peer] = msgspec.structs.replace(known, probed_bytes_per_s=probed)

    def probed(self, peer: Incarnation) -> float:
        """Return the rate in bytes/s at which a peer's pattern was read; 0 if the peer is down."""
        with self._lock:
            known = self._peers.get(peer)
        return 0.0 if known is None else known.probed_bytes_per_s

    def throughput(self, peer: Incarnation, *, bytes_per_s: float, waiting_bytes: int) -> None:
        """Record the rate of KV from a known peer (0 while unknown) and the bytes that wait."""
        with self._lock:
            known = self._peers.get(peer)
            if known is not None:
                self._peers[peer] = msgspec.structs.replace(
                    known, bytes_per_s=bytes_per_s, waiting_bytes=waiting_bytes
                )

    def quarantine(self, peer: Incarnation, until: Millis) -> None:
        self._quarantined_until.pop(peer, None)
        self._quarantined_until[peer] = until
        for old in list(self._quarantined_until)[:-MAX_REMEMBERED]:
            del self._quarantined_until[old]

    def quarantine_ms_left(self, peer: Incarnation, now: Millis) -> int:
        return max(0, self._quarantined_until.get(peer, Millis(0)) - now)


logger = logging.getLogger(__name__)

FIRST_PAUSE_MS = 50
LONGEST_PAUSE_MS = 2000
STEADY_MS = 3000
"""Age of a good link: the next is made soon."""
LOOKUP_MS = 20
"""Pause between two polls of a lookup."""
_BATCH = 512


_ENDS = zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED


@dataclass(slots=True)
class _Link:
    """One connection to one producer."""

    number: LinkNumber
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    session: Session
    since: Millis | None = None

    @property
    def stands(self) -> bool:
        return self.since is not None


@dataclass(slots=True)
class _Producer:
    """A discovered endpoint."""

    endpoint: str
    retry_at: Millis
    link: _Link | None = None
    pause_ms: int = FIRST_PAUSE_MS
    lookup: Lookup | None = None
    """Lookup of the peer's address while it runs."""
    failures: int = 0
    """Failed connections: each tries the next of the known keys."""
    without: dict[str, Millis] = field(default_factory=dict)
    """Failed transports, with the time until which they are not offered."""


class ControlClient(Channel):
    """Keeps a link to each endpoint of ``SetPeers``."""

    name = "kv-control-d"
    connectors: tuple[str, ...] = ()
    """Loaded transports, best first; set before ``start``."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._resolver = Resolver()
        """ZMQ would look names up in the thread of all links' frames."""
        self._numbers = itertools.count(1)
        self._producers: dict[str, _Producer] = {}
        self._by_number: dict[LinkNumber, _Producer] = {}

    def next_wake(self) -> float:
        due = [each.retry_at for each in self._producers.values() if each.link is None]
        return min([super().next_wake(), *due])

    def on_item(self, item: SendMessage | Drop | SetPeers, now: Millis) -> None:
        if isinstance(item, SetPeers):
            self._set_peers(item.endpoints, now)
            return
        producer = self._by_number.get(item.link)
        if producer is None:
            return
        if isinstance(item, SendMessage):
            self._send(producer, item.message, now)
        else:
            self._send(producer, Reset(item.reason[:500]), now)
            self._lose(producer, item.reason, now, rest_ms=item.rest_ms)
            if item.without:
                producer.without[item.without] = Millis(now + item.without_ms)
                producer.retry_at = Millis(now + FIRST_PAUSE_MS)

    def on_ready(self, ready: dict[object, int], now: Millis) -> None:
        for producer in list(self._producers.values()):
            link = producer.link
            if link is None:
                continue
            if link.socket in ready:
                self._read(producer, link, now)
            if producer.link is link and link.monitor in ready:
                self._on_monitor(producer, link, now)

    def on_due(self, now: Millis) -> None:
        for producer in self._producers.values():
            if producer.link is None and now >= producer.retry_at:
                address = self._address_of(producer, now)
                if address is not None:
                    self._try_to_connect(producer, address, now)

    def on_tick(self, now: Millis, late: float = 0.0) -> None:
        """Send beats to producers; drop those that are silent, stall or sent no WELCOME."""
        beat = self.beat()
        for producer in list(self._producers.values()):
            link = producer.link
            if link is None:
                continue
            link.session.alive.overslept(late)
            fault = link.session.overdue(now / 1000)
            if fault is not None:
                self._lose(producer, fault, now)
            elif link.stands:
                self._send(producer, beat, now)

    def close_sockets(self) -> None:
        for producer in self._producers.values():
            link = producer.link
            if link is not None and link.stands:
                frames = [link.session.seal(), encode(Reset("the worker ends"))]
                with contextlib.suppress(zmq.ZMQError):
                    link.socket.send_multipart(frames, zmq.NOBLOCK)
                down = LinkDown(link.session.peer, link.number, self.problem or "the worker ends")
                self._deliver(down)
            self._close(producer, linger=100)

    def _set_peers(self, endpoints: tuple[str, ...], now: Millis) -> None:
        for endpoint in [each for each in self._producers if each not in endpoints]:
            producer = self._producers[endpoint]
            self._lose(producer, "no longer a peer", now)
            del self._producers[endpoint]
        for endpoint in endpoints:
            self._producers.setdefault(endpoint, _Producer(endpoint, now))

    def _address_of(self, producer: _Producer, now: Millis) -> str | None:
        """Return ``host:port`` in numbers; None for an invalid endpoint, or before a lookup has
        succeeded."""
        host, _, port = producer.endpoint.rpartition(":")
        try:
            if producer.lookup is None:
                producer.lookup = self._resolver.ask(host.strip("[]"), int(port))
            found = producer.lookup.poll()
        except (TransportError, ValueError) as error:
            logger.warning("no link to %s: %s", producer.endpoint, error)
            producer.lookup = None
            self._pause(producer, now)
            return None
        if found is None:
            producer.retry_at = Millis(now + LOOKUP_MS)
            return None
        producer.lookup = None
        number = found[1][0]
        return f"[{number}]:{port}" if found[0] is AddressFamily.AF_INET6 else f"{number}:{port}"

    def _try_to_connect(self, producer: _Producer, address: str, now: Millis) -> None:
        try:
            self._connect(producer, address, now)
        except (zmq.ZMQError, InvalidParameter) as error:
            logger.error("no link to %s: %s", producer.endpoint, error)
            producer.failures += 1
            self._pause(producer, now)

    def _connect(self, producer: _Producer, address: str, now: Millis) -> None:
        socket = control_socket(self._context, zmq.DEALER)
        if address.startswith("["):
            socket.setsockopt(zmq.IPV6, 1)
        try:
            if self.guard is not None:
                lenders = ("decode",) if self.config.kv_pull_peers else ()
                self.guard.call(socket, "prefill", *lenders, attempt=producer.failures)
            monitor = socket.get_monitor_socket(_ENDS)
        except (zmq.ZMQError, InvalidParameter):
            socket.close(0)
            raise
        number = LinkNumber(next(self._numbers))
        producer.link = link = _Link(number, socket, monitor, Session(self.terms))
        try:
            socket.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            self._lose(producer, f"{producer.endpoint}: {error}", now)
            return
        self._by_number[number] = producer
        self.watch(socket)
        self.watch(monitor)
        head = link.session.greet(now / 1000)
        hello = self.terms.hello(self._offered(producer, now))
        self._write(producer, link, [head, encode(hello)], now)

    def _offered(self, producer: _Producer, now: Millis) -> tuple[str, ...]:
        """Return the connectors for this link: all but those that failed lately, and always the
        last."""
        known, last = producer.without, self.connectors[-1:]
        found = (each for each in self.connectors[:-1] if known.get(each, now) <= now)
        return (*found, *last)

    def _read(self, producer: _Producer, link: _Link, now: Millis) -> None:
        for _ in range(_BATCH):
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frames(producer, link, frames, now)
            if producer.link is not link:
                return

    def _on_frames(
        self, producer: _Producer, link: _Link, frames: list[bytes], now: Millis
    ) -> None:
        session = link.session
        verdict, message = session.receive(frames, decode_to_consumer, now / 1000)
        if verdict is Verdict.DELIVER:
            assert message is not None
            received = FromPeer(session.peer, link.number, message)  # type: ignore[arg-type]
            if not self.from_peer(received):
                self._send(producer, Reset("it sends more messages than are read"), now)
                self._lose(producer, "it sends more messages than are read", now)
        elif verdict is Verdict.UP:
            assert isinstance(message, Welcome)
            self._on_welcome(producer, link, message.card, now)
        elif verdict is Verdict.GARBAGE or (verdict is Verdict.STRAY and link.stands):
            self.garbage()
        elif verdict is Verdict.REFUSED:
            logger.warning("%s turned this worker away: %s", producer.endpoint, session.why)
            self._lose(producer, session.why, now, rest_ms=LONGEST_PAUSE_MS)
        elif verdict is not Verdict.NOTED:
            # Even one stray frame breaks a link, which has its own connection.
            self._lose(producer, session.why or "a frame was lost or misdirected", now)

    def _on_welcome(
        self, producer: _Producer, link: _Link, card: ProducerCard, now: Millis
    ) -> None:
        link.since = now
        host = producer.endpoint.rpartition(":")[0].strip("[]")
        self._deliver(LinkUp(link.session.peer, link.number, card.connector, host, card))

    def _on_monitor(self, producer: _Producer, link: _Link, now: Millis) -> None:
        recv_monitor_message(link.monitor, zmq.NOBLOCK)
        self._lose(producer, "the connection was closed", now)

    def _send(self, producer: _Producer, message: Message, now: Millis) -> None:
        link = producer.link
        if link is None:
            return
        self._write(producer, link, [link.session.seal(), encode(message)], now)

    def _write(self, producer: _Producer, link: _Link, parts: list[bytes], now: Millis) -> None:
        try:
            link.socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._lose(producer, f"cannot send: {error}", now)

    def _lose(self, producer: _Producer, reason: str, now: Millis, rest_ms: int = 0) -> None:
        link = producer.link
        if link is None:
            return
        stood = link.stands
        self._close(producer)
        if link.since is not None and now - link.since >= STEADY_MS:
            producer.pause_ms = FIRST_PAUSE_MS
        self._pause(producer, now, rest_ms)
        producer.failures += not stood
        if stood:
            logger.info("link to %s ends: %s", producer.endpoint, reason)
            self.metrics.links_lost.labels("consumer").inc()
            self._deliver(LinkDown(link.session.peer, link.number, reason))

    def _pause(self, producer: _Producer, now: Millis, rest_ms: int = 0) -> None:
        producer.retry_at = Millis(now + max(producer.pause_ms, rest_ms))
        producer.pause_ms = min(2 * producer.pause_ms, LONGEST_PAUSE_MS)

    def _close(self, producer: _Producer, linger: int = 0) -> None:
        link, producer.link = producer.link, None
        if link is None:
            return
        self._by_number.pop(link.number, None)
        for socket in (link.socket, link.monitor):
            self.unwatch(socket)
        link.socket.disable_monitor()
        link.monitor.close()
        link.socket.close(linger=linger)
