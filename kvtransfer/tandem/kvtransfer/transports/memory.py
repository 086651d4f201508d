"""Reads within one process, for tests: a copy between slots, as late as the test wishes.

Producers are found by their card in a table of this module. ``hold`` keeps reads pending, so that
a test decides when a read lands, even one that nobody wants any more.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.mover.memory import SlotMemory
from tandem.kvtransfer.transports.base import Extent, Progress, Ticket, Traits
from tandem.protocol.ids import Incarnation

_served: dict[bytes, SlotMemory] = {}
_lock = threading.Lock()
_cards = itertools.count()


class MemoryTransport:
    """Both ends."""

    traits = Traits(name="memory", needs_advance=False)

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._reads: dict[Ticket, tuple[bytes, tuple[Extent, ...]]] = {}
        self._cards: dict[Incarnation, bytes] = {}
        self._memory: SlotMemory | None = None
        self._card: bytes | None = None
        self.hold = threading.Event()
        """Set: reads stay pending."""

    def serve(self, memory: SlotMemory) -> bytes:
        """Enter the slots into the table."""
        with _lock:
            self._card = b"memory-%d" % next(_cards)
            _served[self._card] = memory
        return self._card

    def receive(self, memory: SlotMemory) -> None:
        """Remember where reads land."""
        self._memory = memory

    def connect(self, peer: Incarnation, host: str, card: bytes) -> None:
        """Find the producer in this process."""
        if card not in _served:
            raise TransportError("memory: the producer is not in this process")
        self._cards[peer] = card

    def read(self, peer: Incarnation, extents: Sequence[Extent]) -> Ticket:
        """Note it; the copy is made by ``poll``."""
        ticket = Ticket(next(self._tickets))
        self._reads[ticket] = (self._cards.get(peer, b""), tuple(extents))
        return ticket

    def poll(self, ticket: Ticket) -> Progress:
        """Copy, unless held."""
        if self.hold.is_set():
            return Progress.PENDING
        card, extents = self._reads.pop(ticket)
        source = _served.get(card)
        if source is None or self._memory is None:
            return Progress.FAILED
        for each in extents:
            if not source.is_within_a_slot(each.remote.offset, each.nbytes):
                return Progress.FAILED
            taken = source.span(each.remote.offset, each.nbytes)
            self._memory.span(each.local.offset, each.nbytes)[:] = taken
        return Progress.DONE

    def advance(self) -> None:
        """Nothing moves by itself."""

    def filenos(self) -> list[int]:
        """None."""
        return []

    def close(self, peer: Incarnation) -> None:
        """Later reads of the peer fail; earlier ones may still land."""
        self._cards.pop(peer, None)

    def stop(self) -> None:
        """Leave the table."""
        if self._card is not None:
            with _lock:
                _served.pop(self._card, None)
