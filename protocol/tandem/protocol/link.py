"""Who a frame is from, whom it is for, and whether one was lost: the header of every frame.

ZMQ reconnects to whatever listens at an address and may deliver frames meant for a process that
is gone. So every frame names both incarnations and counts up; a frame for another incarnation or
with a gap breaks the link: RESET, all its keys fail, and both ends count from 0 again after a
HELLO. Pure: no sockets.
"""

import struct
from enum import Enum

import msgspec

from tandem.protocol.errors import WireError
from tandem.protocol.ids import NOBODY, Incarnation

HEADER = struct.Struct("<4s16s16sQ")
MAGIC = b"TDM1"
HEADER_BYTES = HEADER.size


class Verdict(Enum):
    """What to do with a frame."""

    DELIVER = "deliver"
    NEW_PEER = "new peer"
    """From an incarnation that this link did not know: the old peer is lost, then deliver."""
    RESET = "reset"
    """Lost or misdirected: fail the link's keys, answer RESET, drop the frame."""


class Header(msgspec.Struct, frozen=True, gc=False):
    """Decoded header."""

    source: Incarnation
    destination: Incarnation
    sequence: int


def read_header(data: bytes) -> Header:
    """Decode, or WireError for anything that is not a header."""
    if len(data) != HEADER_BYTES:
        raise WireError(f"header of {len(data)} bytes; it has {HEADER_BYTES}")
    magic, source, destination, sequence = HEADER.unpack(data)
    if magic != MAGIC:
        raise WireError("header without its magic")
    return Header(source, destination, sequence)


def write_header(source: Incarnation, destination: Incarnation, sequence: int) -> bytes:
    """Bytes of a header."""
    return HEADER.pack(MAGIC, source, destination, sequence)


class Link:
    """Both directions of one link, as one end sees it."""

    def __init__(self, me: Incarnation, peer: Incarnation = NOBODY) -> None:
        self.me = me
        self.peer = peer
        self._sent = 0
        self._expected = 0

    def seal(self) -> bytes:
        """Header of the next frame to send."""
        header = HEADER.pack(MAGIC, self.me, self.peer, self._sent)
        self._sent += 1
        return header

    def accept(self, header: Header) -> Verdict:
        """Judge an incoming frame and, when it is delivered, count it."""
        if header.destination not in (self.me, NOBODY):
            return Verdict.RESET
        if header.source != self.peer:
            if header.sequence != 0:
                return Verdict.RESET
            known = self.peer != NOBODY
            self.peer = header.source
            self._expected = 1
            if known:
                self._sent = 0
            return Verdict.NEW_PEER
        if header.sequence != self._expected:
            return Verdict.RESET
        self._expected += 1
        return Verdict.DELIVER

    def restart(self) -> None:
        """Count from 0 again, both ways: after a RESET, before the next HELLO."""
        self.peer = NOBODY
        self._sent = 0
        self._expected = 0
