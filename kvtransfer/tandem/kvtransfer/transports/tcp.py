"""KV over plain TCP, for machines without a better transport.

Each receiving thread has one socket of each link (``tcp_streams``). Answers come in the order of
requests, directly into the slots. Closing a socket ends its reads for certain.
"""

from __future__ import annotations

import itertools
import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.memory.blocks import Blocks
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.resolver import Lookup, Resolver
from tandem.kvtransfer.transports.base import (
    Extent,
    Progress,
    Ticket,
    Traits,
)
from tandem.kvtransfer.transports.tcp_server import (
    ANSWER,
    GREETING,
    MAGIC,
    REQUEST,
    TcpCard,
    TcpServer,
    decode_card,
    encode_card,
    prepare,
)
from tandem.link.wake_queue import WakeQueue
from tandem.protocol.ids import Incarnation

logger = logging.getLogger(__name__)

_AT_ONCE = 1 << 20
"""Bytes received from one peer before the next peer's turn, under the lock."""
_STRIPE = 1 << 20
"""Minimum bytes of a stripe."""
_LOOKING_MS = 5

Ended = tuple[Ticket, Progress]


class Link:
    """All sockets to one producer. A broken link stays broken."""

    def __init__(self, lookup: Lookup, greeting: bytes, count: int) -> None:
        self.streams = [Stream(self, lookup, greeting) for _ in range(count)]
        self._missing: dict[Ticket, int] = {}
        self._lock = threading.Lock()
        """Lock of the missing bytes; never held together with a stream's."""
        self._over = False
        self._next = 0

    def ask(self, ticket: Ticket, extents: Sequence[Extent]) -> bool:
        stripes: list[list[tuple[int, int, int]]] = [[] for _ in self.streams]
        for each in extents:
            pieces = max(1, min(len(stripes), each.nbytes // _STRIPE))
            size = -(-each.nbytes // pieces)
            for start in range(0, each.nbytes, size):
                nbytes = min(size, each.nbytes - start)
                stripe = (each.remote.offset + start, each.local.offset + start, nbytes)
                stripes[self._next].append(stripe)
                self._next = (self._next + 1) % len(stripes)
        with self._lock:
            if self._over:
                return False
            self._missing[ticket] = sum(map(len, stripes))
        # From here on, a close of the link reports this read as failed, too.
        for stream, wanted in zip(self.streams, stripes, strict=True):
            stream.ask(ticket, wanted)
        return True

    def landed(self, ticket: Ticket) -> bool:
        """Record a finished stripe; return whether it was the read's last."""
        with self._lock:
            if ticket not in self._missing:
                return False
            self._missing[ticket] -= 1
            if self._missing[ticket]:
                return False
            del self._missing[ticket]
            return True

    def close(self) -> list[Ended]:
        with self._lock:
            self._over = True
        for stream in self.streams:
            stream.close()
        with self._lock:
            failed = [(ticket, Progress.FAILED) for ticket in self._missing]
            self._missing.clear()
        return failed


class Stream:
    """One socket of a link; ``lock`` guards everything in it and what it receives."""

    def __init__(self, link: Link, lookup: Lookup, greeting: bytes) -> None:
        self.link = link
        self.lock = threading.Lock()
        self.sock: socket.socket | None = None
        """None before the address is known, and after the end."""
        self._lookup: Lookup | None = lookup
        self._closed = False
        self._outgoing = bytearray(greeting)
        self._waiting: deque[tuple[Ticket, int, int]] = deque()
        """(ticket, offset in the receive slots, bytes) in the order of their answers."""
        self._head = bytearray()
        self._into: memoryview | None = None
        """Remaining buffer of the first answer."""

    def ask(self, ticket: Ticket, stripes: Sequence[tuple[int, int, int]]) -> None:
        with self.lock:
            for remote, local, nbytes in stripes:
                self._waiting.append((ticket, local, nbytes))
                self._outgoing += REQUEST.pack(remote, nbytes, ticket)

    def wants(self) -> tuple[socket.socket | None, int]:
        """Return the socket and poll's events for it; without a socket, 1 or 0 to look again or
        not."""
        if self._closed:
            return None, 0
        if self._lookup is not None:
            return None, 1
        sending = select.POLLOUT if self._outgoing else 0
        return self.sock, sending | select.POLLIN

    def advance(self, memory: SlotMemory, landed: Callable[[Ticket], None]) -> None:
        with self.lock:
            if self._lookup is not None and not self._open(self._lookup):
                return
            if self.sock is None:
                return
            try:
                self._send(self.sock)
                self._receive(self.sock, memory, landed)
            except BlockingIOError:
                return

    def close(self) -> None:
        with self.lock:
            self._closed, self._lookup, self._into = True, None, None
            if self.sock is not None:
                self.sock.close()
                self.sock = None

    def _open(self, lookup: Lookup) -> bool:
        found = lookup.poll()
        if found is None or self._closed:
            return False
        self._lookup = None
        family, address = found
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        prepare(self.sock)
        self.sock.connect_ex(address)
        return True

    def _send(self, sock: socket.socket) -> None:
        while self._outgoing:
            try:
                sent = sock.send(self._outgoing)
            except BlockingIOError:  # or still connecting
                return
            del self._outgoing[:sent]

    def _receive(
        self, sock: socket.socket, memory: SlotMemory, landed: Callable[[Ticket], None]
    ) -> None:
        left = _AT_ONCE
        while left > 0:
            if self._into is None:
                self._receive_head(sock, memory)
                continue
            got = sock.recv_into(self._into)
            if not got:
                raise ConnectionResetError
            left -= got
            self._into = self._into[got:]
            if not len(self._into):
                landed(self._waiting.popleft()[0])
                self._into = None

    def _receive_head(self, sock: socket.socket, memory: SlotMemory) -> None:
        data = sock.recv(ANSWER.size - len(self._head))
        if not data:
            raise ConnectionResetError
        self._head += data
        if len(self._head) < ANSWER.size:
            return
        answered, size = ANSWER.unpack(self._head)
        self._head.clear()
        if not self._waiting or self._waiting[0][::2] != (answered, size):
            raise ConnectionAbortedError
        self._into = memory.span(self._waiting[0][1], size)


class Receiver:
    """Thread that serves one stream of every link."""

    def __init__(self, index: int, memory: SlotMemory, ended: WakeQueue[Ended]) -> None:
        self._memory = memory
        self._ended = ended
        self._bell: WakeQueue[None] = WakeQueue()
        self._streams: list[Stream] = []
        """Replaced as a whole by the transfer thread."""
        self._stopping = False
        name = f"kv-tcp-receive-{index}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, stream: Stream) -> None:
        self._streams = [*self._streams, stream]
        self.wake()

    def remove(self, stream: Stream) -> None:
        self._streams = [each for each in self._streams if each is not stream]
        self.wake()

    def wake(self) -> None:
        self._bell.wake()

    def stop(self) -> None:
        """End the thread; streams are closed already."""
        self._stopping = True
        self._bell.wake()
        self._thread.join(timeout=5.0)
        self._bell.close()

    def _run(self) -> None:
        while not self._stopping:
            ready = self._wait()
            for stream in ready:
                self._advance(stream)

    def _wait(self) -> list[Stream]:
        poller, by_number, looks = select.poll(), dict[int, Stream](), list[Stream]()
        poller.register(self._bell.fileno(), select.POLLIN)
        for stream in self._streams:
            sock, events = stream.wants()
            number = -1 if sock is None else sock.fileno()
            if number >= 0:
                by_number[number] = stream
                poller.register(number, events)
            elif sock is None and events:
                looks.append(stream)
        found = poller.poll(_LOOKING_MS if looks else None)
        self._bell.hush()
        return [*looks, *(by_number[number] for number, _ in found if number in by_number)]

    def _advance(self, stream: Stream) -> None:
        def landed(ticket: Ticket) -> None:
            if stream.link.landed(ticket):
                self._report((ticket, Progress.DONE))

        try:
            stream.advance(self._memory, landed)
        except (OSError, TransportError) as error:
            logger.debug("tcp: a connection for KV ends: %r", error)
            for each in stream.link.close():
                self._report(each)

    def _report(self, ended: Ended) -> None:
        self._ended.add(ended)
        self._ended.wake()


class TcpTransport:
    """Transport of both ends."""

    traits = Traits(name="tcp", needs_advance=False, max_extents=64)

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        host: str,
        first_port: int = 0,
        num_ports: int = 1,
        streams: int = 1,
        on_garbage: Callable[[], None] = lambda: None,
        resolver: Resolver | None = None,
    ) -> None:
        """``streams`` is the number of sockets of each link, and of threads for either
        direction."""
        self._resolver = Resolver() if resolver is None else resolver
        self._incarnation = incarnation
        self._host = host
        self._ports = (first_port, num_ports)
        self._num_streams = streams
        self._on_garbage = on_garbage
        self._server: TcpServer | None = None
        self._receivers: list[Receiver] = []
        self._links: dict[Incarnation, Link] = {}
        self._tickets = itertools.count()
        self._ended: WakeQueue[Ended] = WakeQueue()
        """Filled by the threads that receive."""
        self._progress: dict[Ticket, Progress] = {}

    def serve(self, memory: SlotMemory, blocks: Blocks | None = None) -> bytes:
        first, num = self._ports
        self._server = TcpServer(
            memory,
            self._incarnation,
            host=self._host,
            first_port=first,
            num_ports=num,
            threads=self._num_streams,
            on_garbage=self._on_garbage,
        )
        self._server.start()
        return encode_card(TcpCard(self._server.port, self._server.secret, self._incarnation))

    def receive(self, memory: SlotMemory, blocks: Blocks | None = None) -> None:
        count = range(self._num_streams)
        self._receivers = [Receiver(index, memory, self._ended) for index in count]

    def connect(self, peer: Incarnation, host: str, card: bytes) -> None:
        """Begin to connect; the first read shows whether it worked."""
        self.close(peer)
        where = decode_card(card)
        greeting = GREETING.pack(MAGIC, where.incarnation, where.secret)
        link = Link(self._resolver.ask(host, where.port), greeting, self._num_streams)
        self._links[peer] = link
        for receiver, stream in zip(self._receivers, link.streams, strict=True):
            receiver.add(stream)

    def read(self, peer: Incarnation, extents: Sequence[Extent]) -> Ticket:
        ticket = Ticket(next(self._tickets))
        link = self._links.get(peer)
        self._progress[ticket] = Progress.PENDING
        if link is None or not link.ask(ticket, extents):
            self._progress[ticket] = Progress.FAILED
        for receiver in self._receivers:
            receiver.wake()
        return ticket

    def poll(self, ticket: Ticket) -> Progress:
        self._take()
        progress = self._progress[ticket]
        if progress is not Progress.PENDING:
            del self._progress[ticket]
        return progress

    def tags_of(self, ticket: Ticket) -> bytes:
        return b""

    def advance(self) -> None:
        self._ended.hush()
        self._take()

    def filenos(self) -> list[int]:
        return [self._ended.fileno()]

    def close(self, peer: Incarnation) -> None:
        link = self._links.pop(peer, None)
        if link is None:
            return
        for each in link.close():
            self._ended.add(each)
        for receiver, stream in zip(self._receivers, link.streams, strict=True):
            receiver.remove(stream)

    def stop(self) -> None:
        for peer in list(self._links):
            self.close(peer)
        for receiver in self._receivers:
            receiver.stop()
        self._receivers = []
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _take(self) -> None:
        for ticket, progress in self._ended.take():
            if self._progress.get(ticket) is Progress.PENDING:
                self._progress[ticket] = progress
