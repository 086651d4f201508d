"""One end of a link driven by hand: it numbers what it says, and judges nothing.

What tests hold the sessions of ``tandem.link`` against; also for saying what no session would.
"""

from __future__ import annotations

from tandem.protocol.ids import NO_INCARNATION, Incarnation
from tandem.protocol.link import Header, write_header


class HandLink:
    def __init__(self, me: Incarnation, peer: Incarnation = NO_INCARNATION) -> None:
        self.me = me
        self.peer = peer
        self._sent = 0
        self._expected = 0

    @property
    def is_met(self) -> bool:
        return self.peer != NO_INCARNATION

    def seal(self) -> bytes:
        """Header of the next frame; one that is not sent is a lost frame."""
        header = write_header(self.me, self.peer, self._sent)
        self._sent += 1
        return header

    def accept(self, header: Header) -> bool:
        """Note who speaks; whether the frame is the next one of that peer for this end."""
        if header.destination not in (self.me, NO_INCARNATION):
            return False
        if header.source != self.peer:
            if header.sequence != 0:
                return False
            if self.peer != NO_INCARNATION:
                self._sent = 0
            self.peer, self._expected = header.source, 0
        fits = header.sequence == self._expected
        self._expected += fits
        return fits

    def restart(self) -> None:
        """Count from 0 again, both ways: before the next HELLO."""
        self.peer = NO_INCARNATION
        self._sent = self._expected = 0
