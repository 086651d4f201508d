"""P's half of tcp: threads that send slots to authenticated peers.

They serve bytes of slots, never addresses. A connection that violates the protocol (wrong secret,
unknown slot or size, silence) is closed and counted.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import itertools
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.kvtransfer.errors import AddressInUse, TransportError
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.link.wake_queue import WakeQueue
from tandem.protocol.ids import Incarnation

GREETING = struct.Struct("<8s16s16s")
"""Magic, P's incarnation, P's secret."""
MAGIC = b"TDMDATA3"
REQUEST = struct.Struct("<QIQ")
"""Offset, bytes, ticket."""
ANSWER = struct.Struct("<QI")
"""Ticket, bytes; the bytes follow."""
SECRET_BYTES = 16


SILENT_SECONDS = 30
"""Seconds after which a connection ends if the kernel of its other end does not answer."""


def prepare(sock: socket.socket) -> None:
    """Set up a connection of either end: data is sent at once, and the kernel detects a dead
    connection."""
    probes = 3
    sock.setblocking(False)
    options = [
        (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", SILENT_SECONDS // 2),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", SILENT_SECONDS // 2 // probes),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", probes),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", SILENT_SECONDS * 1000),
    ]
    for level, name, value in options:
        if hasattr(socket, name):  # not every system has all
            sock.setsockopt(level, getattr(socket, name), value)


class TcpCard(msgspec.Struct, frozen=True, array_like=True):
    """Port and secret of P's server, which D needs to connect."""

    port: Annotated[int, Meta(ge=1, le=65535)]
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    incarnation: Annotated[bytes, Meta(min_length=16, max_length=16)]


_cards = msgspec.msgpack.Decoder(TcpCard)  # made once, as threads must not make it at the same time


def encode_card(card: TcpCard) -> bytes:
    """Encode a card for WELCOME."""
    return msgspec.msgpack.encode(card)


def decode_card(data: bytes) -> TcpCard:
    """Decode a card from WELCOME. Raises TransportError."""
    try:
        return _cards.decode(data)
    except msgspec.MsgspecError as error:
        raise TransportError(f"tcp: not a card: {error}") from error


logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
GREETING_SECONDS = 5.0
REST_SECONDS = 1.0
"""Seconds without new connections after the process ran out of descriptors."""
MAX_QUEUED = 1024
"""Requests of one connection that wait to be sent."""


class _Peer:
    """One connection."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.sock = sock
        self.greeted = False
        self.since = now
        self.received = bytearray()
        self.sending: list[memoryview] = []
        """Answers in order; the first may be partly sent."""


class _Sender:
    """A thread that serves some of the connections."""

    def __init__(
        self, memory: SlotMemory, expected: bytes, on_garbage: Callable[[], None], name: str
    ) -> None:
        self._memory = memory
        self._expected = expected
        self._on_garbage = on_garbage
        self._selector = selectors.DefaultSelector()
        self._bell: WakeQueue[socket.socket | None] = WakeQueue()
        """Connections to take over; None ends the thread."""
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._peers: set[_Peer] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.take_over(None)
        self._thread.join(timeout=5.0)
        self._bell.close()

    def take_over(self, sock: socket.socket | None) -> None:
        """Serve this connection from now on; None ends the thread."""
        self._bell.add(sock)
        self._bell.wake()

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            for peer in list(self._peers):
                self._close(peer)
            self._selector.close()

    def _turn(self) -> bool:
        for key, events in self._selector.select(1.0 if self._is_waiting() else None):
            if key.fileobj is self._bell:
                self._bell.hush()
                for sock in self._bell.take():
                    if sock is None:
                        return False
                    self._begin(sock)
            elif key.data is None:
                self._accept()
            else:
                self._serve(key.data, events)
        self._drop_the_silent()
        return True

    def _is_waiting(self) -> bool:
        return any(not peer.greeted for peer in self._peers)

    def _accept(self) -> None:
        raise AssertionError("only one of the threads listens")

    def _begin(self, sock: socket.socket) -> None:
        peer = _Peer(sock, time.monotonic())
        self._peers.add(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)

    def _serve(self, peer: _Peer, events: int) -> None:
        try:
            fine = not events & selectors.EVENT_READ or self._receive(peer)
            if fine:
                self._send(peer)
        except OSError:
            fine = False
        if not fine:
            self._close(peer)

    def _receive(self, peer: _Peer) -> bool:
        try:
            data = peer.sock.recv(64 << 10)
        except BlockingIOError:
            return True
        if not data:
            return False
        peer.received += data
        if not peer.greeted and len(peer.received) >= GREETING.size:
            if not hmac.compare_digest(bytes(peer.received[: GREETING.size]), self._expected):
                self._on_garbage()
                return False
            del peer.received[: GREETING.size]
            peer.greeted = True
        while peer.greeted and len(peer.received) >= REQUEST.size:
            offset, nbytes, ticket = REQUEST.unpack_from(peer.received)
            del peer.received[: REQUEST.size]
            in_range = self._memory.is_within_a_slot(offset, nbytes)
            if not in_range or len(peer.sending) > 2 * MAX_QUEUED:
                self._on_garbage()
                return False
            peer.sending.append(memoryview(ANSWER.pack(ticket, nbytes)))
            peer.sending.append(self._memory.span(offset, nbytes))
        return True

    def _send(self, peer: _Peer) -> None:
        while peer.sending:
            try:
                sent = peer.sock.sendmsg(peer.sending[:2])
            except BlockingIOError:
                break
            while sent and sent >= len(peer.sending[0]):
                sent -= len(peer.sending.pop(0))
            if sent:
                peer.sending[0] = peer.sending[0][sent:]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.sending else 0)
        self._selector.modify(peer.sock, events, peer)

    def _drop_the_silent(self) -> None:
        now = time.monotonic()
        for peer in list(self._peers):
            if not peer.greeted and now - peer.since > GREETING_SECONDS:
                self._on_garbage()
                self._close(peer)

    def _close(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.sock)
        peer.sock.close()


class TcpServer(_Sender):
    """Server that listens on construction. The first of its threads accepts connections, and all
    share them."""

    def __init__(
        self,
        memory: SlotMemory,
        incarnation: Incarnation,
        *,
        host: str,
        first_port: int,
        num_ports: int,
        threads: int = 1,
        on_garbage: Callable[[], None],
    ) -> None:
        self.secret = os.urandom(SECRET_BYTES)
        expected = GREETING.pack(MAGIC, incarnation, self.secret)
        super().__init__(memory, expected, on_garbage, "kv-tcp")
        self._others = [
            _Sender(memory, expected, on_garbage, f"kv-tcp-{index}") for index in range(1, threads)
        ]
        self._turns = itertools.cycle([self, *self._others])
        self._listener = _listen(host, first_port, num_ports)
        self.port: int = self._listener.getsockname()[1]
        self._rests_until: float | None = None
        """Set while no connections are accepted."""

    def start(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        for each in self._others:
            each.start()
        super().start()

    def stop(self) -> None:
        super().stop()
        for each in self._others:
            each.stop()
        self._listener.close()

    def _is_waiting(self) -> bool:
        return self._rests_until is not None or super()._is_waiting()

    def _turn(self) -> bool:
        goes_on = super()._turn()
        if goes_on and self._rests_until is not None and time.monotonic() >= self._rests_until:
            self._rests_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        return goes_on

    def _rest(self) -> None:
        """Accept no connections for a while: polling a refused caller again and again would delay
        the open connections."""
        logger.error("tcp: no descriptor is left for another connection")
        self._selector.unregister(self._listener)
        self._rests_until = time.monotonic() + REST_SECONDS

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._rest()
            return
        if self.num_peers + sum(each.num_peers for each in self._others) >= MAX_CONNECTIONS:
            sock.close()
            return
        prepare(sock)
        one = next(self._turns)
        if one is self:
            self._begin(sock)
        else:
            one.take_over(sock)


def _listen(host: str, first_port: int, num_ports: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = [0] if first_port == 0 else range(first_port, min(first_port + num_ports, 65536))
    for port in ports:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            sock.close()
            if port == ports[-1]:
                raise AddressInUse(f"tcp: no port of {ports} on {host}: {error}") from error
            continue
        sock.listen(MAX_CONNECTIONS)
        sock.setblocking(False)
        return sock
    raise AssertionError("there is at least one port to try")
