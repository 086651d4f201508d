"""Header of every frame: source, destination and number, from 0.

ZMQ may deliver frames that were meant for an ended process.
"""

from __future__ import annotations

import struct
from importlib.metadata import version

import msgspec

from tandem.protocol.errors import WireError
from tandem.protocol.ids import Incarnation

DISTRIBUTION = "tandem-serving"
"""Name of the package at an index."""


def tandem_version() -> str:
    """Return the version, such as "0.1.0"."""
    return version(DISTRIBUTION)


HEADER = struct.Struct("<4s16s16sQ")
MAGIC = b"TDM1"
HEADER_BYTES = HEADER.size
WORKER_BEAT_SECONDS = 1.0
"""Interval of a worker's beats to its routers."""
WORKER_PATIENCE_SECONDS = 5.0
"""Time without a frame after which a worker drops a router and its requests."""


class Header(msgspec.Struct, frozen=True, gc=False):
    """Decoded header."""

    source: Incarnation
    destination: Incarnation
    sequence: int


def read_header(data: bytes) -> Header:
    """Return the decoded header. Raises WireError."""
    if len(data) != HEADER_BYTES:
        raise WireError(f"header of {len(data)} bytes; it has {HEADER_BYTES}")
    magic, source, destination, sequence = HEADER.unpack(data)
    if magic != MAGIC:
        raise WireError("header without its magic")
    return Header(source, destination, sequence)


def write_header(source: Incarnation, destination: Incarnation, sequence: int) -> bytes:
    """Return the bytes of a header."""
    return HEADER.pack(MAGIC, source, destination, sequence)
