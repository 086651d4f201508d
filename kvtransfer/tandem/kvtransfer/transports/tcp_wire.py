"""Bytes of the tcp transport: a greeting, requests for bytes of slots, answers with them.

Bytes are named by their offset from the first slot's start. The greeting carries P's incarnation
and a secret that P gave to D over the authenticated control link, so that other callers are
refused.
"""

from __future__ import annotations

import socket
import struct
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.kvtransfer.errors import TransportError

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
    connection, also while it is idle."""
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
    """Card of P's server."""

    port: Annotated[int, Meta(ge=1, le=65535)]
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    incarnation: Annotated[bytes, Meta(min_length=16, max_length=16)]


_cards = msgspec.msgpack.Decoder(TcpCard)  # built once: threads must not do it side by side


def encode_card(card: TcpCard) -> bytes:
    """Encode a card for WELCOME."""
    return msgspec.msgpack.encode(card)


def decode_card(data: bytes) -> TcpCard:
    """Decode a card from WELCOME. Raises TransportError."""
    try:
        return _cards.decode(data)
    except msgspec.MsgspecError as error:
        raise TransportError(f"tcp: not a card: {error}") from error
