"""KV over plain TCP, for machines where nothing better loads.

D's half runs in the transfer thread over non-blocking sockets, one a peer; answers come in the
order of requests and are received straight into the slots. Closing a socket ends its reads for
certain: what the kernel still holds never reaches a slot.
"""

from __future__ import annotations

import itertools
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.memory.blocks import Blocks
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.resolver import Lookup, Resolver
from tandem.kvtransfer.transports.base import Extent, Progress, Ticket, Traits
from tandem.kvtransfer.transports.tcp_server import TcpServer
from tandem.kvtransfer.transports.tcp_wire import (
    ANSWER,
    GREETING,
    MAGIC,
    REQUEST,
    TcpCard,
    decode_card,
    encode_card,
)
from tandem.protocol.ids import Incarnation

logger = logging.getLogger(__name__)

_AT_ONCE = 8 << 20
"""Bytes received from one peer before others get their turn."""


class _Link:
    """One socket to one producer; without a lookup and a socket it is broken."""

    def __init__(self, lookup: Lookup, greeting: bytes) -> None:
        self.lookup: Lookup | None = lookup
        """Where to connect to, while that is not known."""
        self.sock: socket.socket | None = None
        """None before and after."""
        self.outgoing = bytearray(greeting)
        self.waiting: deque[tuple[Ticket, int, int]] = deque()
        """(ticket, offset in the receive slots, bytes) in the order of their answers."""
        self.head = bytearray()
        self.into: memoryview | None = None
        """What is still to come of the first answer's bytes."""


class TcpTransport:
    """Both ends."""

    traits = Traits(name="tcp", needs_advance=False, max_extents=64)

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        host: str,
        first_port: int = 0,
        num_ports: int = 1,
        on_garbage: Callable[[], None] = lambda: None,
        resolver: Resolver | None = None,
    ) -> None:
        self._resolver = Resolver() if resolver is None else resolver
        self._incarnation = incarnation
        self._host = host
        self._ports = (first_port, num_ports)
        self._on_garbage = on_garbage
        self._server: TcpServer | None = None
        self._memory: SlotMemory | None = None
        self._links: dict[Incarnation, _Link] = {}
        self._tickets = itertools.count()
        self._progress: dict[Ticket, Progress] = {}
        self._missing: dict[Ticket, int] = {}
        """Extents of a pending read that are not here yet, where it has several."""

    def serve(self, memory: SlotMemory, blocks: Blocks | None = None) -> bytes:
        """Start the server thread."""
        first, num = self._ports
        self._server = TcpServer(
            memory,
            self._incarnation,
            host=self._host,
            first_port=first,
            num_ports=num,
            on_garbage=self._on_garbage,
        )
        self._server.start()
        return encode_card(TcpCard(self._server.port, self._server.secret, self._incarnation))

    def receive(self, memory: SlotMemory, blocks: Blocks | None = None) -> None:
        """Remember where reads land."""
        self._memory = memory

    def connect(self, peer: Incarnation, host: str, card: bytes) -> None:
        """Begin to connect; the first read shows whether it worked."""
        self.close(peer)
        where = decode_card(card)
        greeting = GREETING.pack(MAGIC, where.incarnation, where.secret)
        link = _Link(self._resolver.ask(host, where.port), greeting)
        self._links[peer] = link
        self._advance(link)

    def read(self, peer: Incarnation, extents: Sequence[Extent]) -> Ticket:
        """Ask for slots."""
        ticket = Ticket(next(self._tickets))
        link = self._links.get(peer)
        if link is None or (link.sock is None and link.lookup is None):
            self._progress[ticket] = Progress.FAILED
            return ticket
        self._progress[ticket] = Progress.PENDING
        if len(extents) > 1:
            self._missing[ticket] = len(extents)
        for each in extents:
            link.waiting.append((ticket, each.local.offset, each.nbytes))
            link.outgoing += REQUEST.pack(each.remote.offset, each.nbytes, ticket)
        self._advance(link)
        return ticket

    def poll(self, ticket: Ticket) -> Progress:
        """As far as ``advance`` has come."""
        progress = self._progress[ticket]
        if progress is not Progress.PENDING:
            del self._progress[ticket]
        return progress

    def tags_of(self, ticket: Ticket) -> Sequence[bytes]:
        """No tags: reads of this transport land in slots."""
        return ()

    def advance(self) -> None:
        """Send requests and receive answers, as far as the sockets allow."""
        for link in self._links.values():
            if link.waiting or link.lookup is not None:
                self._advance(link)

    def filenos(self) -> list[int]:
        """Sockets on which answers are awaited."""
        return [
            link.sock.fileno()
            for link in self._links.values()
            if link.sock is not None and link.waiting and not link.outgoing
        ]

    def close(self, peer: Incarnation) -> None:
        """Close its socket: its reads are over."""
        link = self._links.pop(peer, None)
        if link is not None:
            self._break(link)

    def stop(self) -> None:
        """Close everything."""
        for peer in list(self._links):
            self.close(peer)
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _advance(self, link: _Link) -> None:
        try:
            if link.lookup is not None:
                self._open(link, link.lookup)
            if link.sock is not None:
                self._send(link)
                self._receive(link)
        except BlockingIOError:
            return
        except (OSError, TransportError) as error:
            logger.debug("tcp: a connection for KV ends: %r", error)
            self._break(link)

    def _open(self, link: _Link, lookup: Lookup) -> None:
        """Begin to connect once the address is known. Raises TransportError, OSError."""
        found = lookup.poll()
        if found is None:
            return
        link.lookup = None
        family, address = found
        link.sock = socket.socket(family, socket.SOCK_STREAM)
        link.sock.setblocking(False)
        link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sock.connect_ex(address)

    def _send(self, link: _Link) -> None:
        assert link.sock is not None
        while link.outgoing:
            try:
                sent = link.sock.send(link.outgoing)
            except BlockingIOError:  # or still connecting
                return
            del link.outgoing[:sent]

    def _receive(self, link: _Link) -> None:
        """Raises BlockingIOError when nothing more has come yet, OSError when it is over."""
        assert link.sock is not None
        left = _AT_ONCE
        while link.waiting and left > 0:
            if link.into is None:
                self._receive_head(link)
                continue
            got = link.sock.recv_into(link.into)
            if not got:
                raise ConnectionResetError
            left -= got
            link.into = link.into[got:]
            if not len(link.into):
                self._landed(link.waiting.popleft()[0])
                link.into = None

    def _landed(self, ticket: Ticket) -> None:
        """One extent is here; the last one ends the read."""
        missing = self._missing.pop(ticket, 1) - 1
        if missing:
            self._missing[ticket] = missing
        else:
            self._progress[ticket] = Progress.DONE

    def _receive_head(self, link: _Link) -> None:
        assert link.sock is not None
        assert self._memory is not None
        data = link.sock.recv(ANSWER.size - len(link.head))
        if not data:
            raise ConnectionResetError
        link.head += data
        if len(link.head) < ANSWER.size:
            return
        answered, size = ANSWER.unpack(link.head)
        link.head.clear()
        ticket, offset, nbytes = link.waiting[0]
        if (answered, size) != (ticket, nbytes):
            raise ConnectionAbortedError
        link.into = self._memory.span(offset, nbytes)

    def _break(self, link: _Link) -> None:
        """The socket is closed first, so that failed is terminal."""
        link.lookup = None
        if link.sock is not None:
            link.sock.close()
            link.sock = None
        link.into = None
        for ticket, _, _ in link.waiting:
            self._progress[ticket] = Progress.FAILED
            self._missing.pop(ticket, None)
        link.waiting.clear()
