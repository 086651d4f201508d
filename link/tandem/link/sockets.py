"""ZMQ sockets for links: bounded frames, no lingering. A socket belongs to one thread."""

from __future__ import annotations

import fcntl
import os
import resource
from contextlib import suppress
from typing import (
    Any,
    Generic,
    TypeAlias,
    TypeVar,
)

import msgspec
import zmq

from tandem.protocol.errors import TandemError, WireError
from tandem.protocol.messages import ToRouter, ToWorker

Message = TypeVar("Message")

MAX_FRAME_BYTES = 64 << 20
"""Maximum bytes of frames between router and worker."""


class Decoder(Generic[Message]):
    """Decoder of the messages of one direction. Raises WireError."""

    def __init__(self, kinds: Any, max_bytes: int) -> None:
        """``kinds``: a union of tagged structs. Longer frames are not decoded."""
        self.max_bytes = max_bytes
        self._decode = msgspec.msgpack.Decoder(kinds).decode

    def __call__(self, payload: bytes) -> Message:
        if len(payload) > self.max_bytes:
            raise WireError(f"frame of {len(payload)} bytes; at most {self.max_bytes} are read")
        try:
            message: Message = self._decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"not a message: {error}") from error
        return message


decode_to_worker: Decoder[ToWorker] = Decoder(ToWorker, MAX_FRAME_BYTES)
decode_to_router: Decoder[ToRouter] = Decoder(ToRouter, MAX_FRAME_BYTES)


ENOUGH = 1 << 20
"""Highest soft limit that is set."""
LEAST = 1024
"""Lowest limit that can serve a small fleet."""

ROOM = 1 << 14
"""Descriptors that the table has room for from the start (128 KiB)."""


def raise_descriptor_limit(least: int = LEAST) -> int:
    """Raise the soft limit on open files up to ENOUGH; return the new limit.

    Raises TandemError if that leaves fewer than ``least``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = ENOUGH if hard == unlimited else min(hard, ENOUGH)
    now = ENOUGH if soft == unlimited else soft
    if now < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        now = most
    if now < least:
        raise TandemError(
            f"this process may open {now} files (RLIMIT_NOFILE, hard limit {hard}); it needs "
            f"{least} at least: raise the limit with `ulimit -Hn`, or of the service or container"
        )
    _make_room(min(now, ROOM))
    return now


def _make_room(count: int) -> None:
    """Make the table hold ``count`` descriptors, if possible."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.close(fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, count - 1))
    finally:
        os.close(null)


Socket: TypeAlias = zmq.Socket[bytes]
Context: TypeAlias = zmq.Context[Socket]

MAX_LINKS = 4096
"""Maximum links of one end; further callers are refused."""
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
"""Monitor events: the keys of the two ends do not fit, or the peer does not use ZMQ."""


def roomy(context: Context | None = None) -> Context:
    """Return a context (a new one by default) for any number of links. Call it before the first
    socket.

    A link takes three sockets, and ZMQ allows 1,023 by default.
    """
    context = zmq.Context() if context is None else context
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


def open_socket(
    context: Context, kind: int, *, max_bytes: int, unsent: int, unread: int = 1000
) -> Socket:
    """Return a socket that closes a connection if a frame of more than ``max_bytes`` comes.

    ``unsent``: frames that may wait for a peer; one more is not sent. ``unread``: frames that may
    wait here before senders have to wait (0: any number).
    """
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.SNDHWM, unsent)
    socket.setsockopt(zmq.RCVHWM, unread)
    # The kernel drops connections beyond ZMQ's default backlog of 100.
    socket.setsockopt(zmq.BACKLOG, MAX_LINKS)
    return socket
