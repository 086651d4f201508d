"""KV over plain TCP, for machines where nothing better loads.

D's half receives by threads of its own, a socket of each link to each (``tcp_streams``); answers
come in the order of requests, right into the slots. Closing a socket ends its reads for certain:
what the kernel still holds never reaches a slot.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from tandem.kvtransfer.memory.blocks import Blocks
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.resolver import Resolver
from tandem.kvtransfer.transports.base import Extent, Progress, Ticket, Traits
from tandem.kvtransfer.transports.tcp_server import TcpServer
from tandem.kvtransfer.transports.tcp_streams import Ended, Link, Receiver
from tandem.kvtransfer.transports.tcp_wire import (
    GREETING,
    MAGIC,
    TcpCard,
    decode_card,
    encode_card,
)
from tandem.link.wake_queue import WakeQueue
from tandem.protocol.ids import Incarnation


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
        streams: int = 1,
        on_garbage: Callable[[], None] = lambda: None,
        resolver: Resolver | None = None,
    ) -> None:
        """``streams``: sockets of each link, and threads that receive, or send, by them."""
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
        """Start the server's threads."""
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
        """Start the threads by which reads land here."""
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
        """Ask for bytes of slots."""
        ticket = Ticket(next(self._tickets))
        link = self._links.get(peer)
        self._progress[ticket] = Progress.PENDING
        if link is None or not link.ask(ticket, extents):
            self._progress[ticket] = Progress.FAILED
        for receiver in self._receivers:
            receiver.wake()
        return ticket

    def poll(self, ticket: Ticket) -> Progress:
        """Return the state of a read, as reported by the threads."""
        self._take()
        progress = self._progress[ticket]
        if progress is not Progress.PENDING:
            del self._progress[ticket]
        return progress

    def tags_of(self, ticket: Ticket) -> bytes:
        """Return no tags: reads of this transport use slots."""
        return b""

    def advance(self) -> None:
        """Take the results of the threads."""
        self._ended.hush()
        self._take()

    def filenos(self) -> list[int]:
        """Return a descriptor that is readable when a read has ended."""
        return [self._ended.fileno()]

    def close(self, peer: Incarnation) -> None:
        """Close its sockets: its reads are over."""
        link = self._links.pop(peer, None)
        if link is None:
            return
        for each in link.close():
            self._ended.add(each)
        for receiver, stream in zip(self._receivers, link.streams, strict=True):
            receiver.remove(stream)

    def stop(self) -> None:
        """Close everything."""
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
