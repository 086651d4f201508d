"""P's half of tcp: a thread that sends slots to peers that greeted rightly, and nothing else.

It serves whole slots from their start, never addresses. Whatever does not follow the protocol
(garbage, a wrong secret, a slot or size that does not exist, silence before the greeting) closes
that connection and is counted.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from tandem.kvtransfer.errors import AddressInUse
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.transports.tcp_wire import ANSWER, GREETING, MAGIC, REQUEST, SECRET_BYTES
from tandem.protocol.ids import Incarnation

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
GREETING_SECONDS = 5.0
REST_SECONDS = 1.0
"""For so long nobody is let in after the process ran out of descriptors."""
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


class TcpServer:
    """Listens on construction; ``start`` runs the thread."""

    def __init__(
        self,
        memory: SlotMemory,
        incarnation: Incarnation,
        *,
        host: str,
        first_port: int,
        num_ports: int,
        on_garbage: Callable[[], None],
    ) -> None:
        self.secret = os.urandom(SECRET_BYTES)
        self._memory = memory
        self._expected = GREETING.pack(MAGIC, incarnation, self.secret)
        self._on_garbage = on_garbage
        self._listener = _listen(host, first_port, num_ports)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._peers: set[_Peer] = set()
        self._rests_until: float | None = None
        """Set while nobody is let in."""
        self._thread = threading.Thread(target=self._run, name="kv-tcp", daemon=True)

    def start(self) -> None:
        """Serve in a thread of its own."""
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._stop_reader, selectors.EVENT_READ, None)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close every connection."""
        self._stop_writer.send(b"\0")
        self._thread.join(timeout=5.0)
        self._stop_writer.close()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            for peer in list(self._peers):
                self._close(peer)
            self._listener.close()
            self._stop_reader.close()
            self._selector.close()

    def _turn(self) -> bool:
        """Serve what is due; False when the end was asked for."""
        waiting = self._rests_until is not None or any(not peer.greeted for peer in self._peers)
        for key, events in self._selector.select(1.0 if waiting else None):
            if key.fileobj is self._stop_reader:
                return False
            if key.data is None:
                self._accept()
            else:
                self._serve(key.data, events)
        self._drop_the_silent()
        if self._rests_until is not None and time.monotonic() >= self._rests_until:
            self._rests_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        return True

    def _rest(self) -> None:
        """Let nobody in for a while: a caller that cannot be let in stays at the door, and asking
        again and again would take the thread from those who are served."""
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
        if len(self._peers) >= MAX_CONNECTIONS:
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
        sock.listen(64)
        sock.setblocking(False)
        return sock
    raise AssertionError("there is at least one port to try")
