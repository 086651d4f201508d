"""Who a frame is from, whom it is for, and its number: the header of every frame.

ZMQ reconnects to whatever listens at an address and may deliver frames meant for a process that is
gone. So every frame names both incarnations and counts up from 0; what that means for a link
``tandem.link.session`` knows.
"""

import struct

import msgspec

from tandem.protocol.errors import WireError
from tandem.protocol.ids import Incarnation

HEADER = struct.Struct("<4s16s16sQ")
MAGIC = b"TDM1"
HEADER_BYTES = HEADER.size
WORKER_BEAT_SECONDS = 1.0
"""Between two beats of a worker to its routers."""
WORKER_PATIENCE_SECONDS = 5.0
"""A router that is silent for so long is gone for a worker; so are its requests."""


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
