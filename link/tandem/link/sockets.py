"""ZMQ sockets for links: any number of them, bounded frames, no lingering.

A socket belongs to one thread; ``curve`` decides which peers may connect.
"""

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
"""Bound of frames between router and worker: a 1 M token prompt is about 5 MB."""


class Decoder(Generic[Message]):
    """Decoder of the messages of one direction."""

    def __init__(self, kinds: Any, max_bytes: int) -> None:
        """Make a decoder of ``kinds``, a union of tagged structs. Longer frames are not decoded."""
        self.max_bytes = max_bytes
        self._decode = msgspec.msgpack.Decoder(kinds).decode

    def __call__(self, payload: bytes) -> Message:
        """Return the message. Raises WireError."""
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
"""Highest soft limit that is set: more is of no use, and some programs walk through all of it."""
LEAST = 1024
"""Least limit with which a small fleet can be served."""

ROOM = 1 << 14
"""Descriptors that the table has room for from the start: 128 KiB."""


class TooFewDescriptors(TandemError):
    """Error: the process may not open as many files as it requires."""


def raise_descriptor_limit(least: int = LEAST) -> int:
    """Raise the soft limit on open files to the hard one (or to ENOUGH); return the new limit.

    Make room for ROOM descriptors in the table, if so many are allowed.

    Raises TooFewDescriptors when that leaves fewer than ``least``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = ENOUGH if hard == unlimited else min(hard, ENOUGH)
    now = ENOUGH if soft == unlimited else soft
    if now < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        now = most
    if now < least:
        raise TooFewDescriptors(
            f"this process may open {now} files (RLIMIT_NOFILE, hard limit {hard}); it needs "
            f"{least} at least: raise the limit with `ulimit -Hn`, or of the service or container"
        )
    _make_room(min(now, ROOM))
    return now


def _make_room(count: int) -> None:
    """Make the table hold ``count`` descriptors; if that fails, it grows later as usual."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.close(fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, count - 1))
    finally:
        os.close(null)


Socket: TypeAlias = zmq.Socket[bytes]
Context: TypeAlias = zmq.Context[Socket]

MAX_LINKS = 4096
"""Links of one end: beyond it callers are turned away."""
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
"""Events of a socket's monitor: the keys of the two ends do not fit, or it is no ZMQ."""


def roomy(context: Context | None = None) -> Context:
    """A context (a new one, if none is given) for any number of links: each takes three sockets,
    and ZMQ allows 1,023 by default. Before its first socket."""
    context = zmq.Context() if context is None else context
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


def open_socket(
    context: Context, kind: int, *, max_bytes: int, unsent: int, unread: int = 1000
) -> Socket:
    """A socket that does not linger and closes connections on which a frame of more than
    ``max_bytes`` comes, unread.

    ``unsent``: frames that may wait for a peer; one more is not sent. ``unread``: frames that may
    wait here before those who send them have to wait (0: any number).
    """
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.SNDHWM, unsent)
    socket.setsockopt(zmq.RCVHWM, unread)
    # Of ZMQ's 100 the rest are dropped by the kernel, and call again seconds later.
    socket.setsockopt(zmq.BACKLOG, MAX_LINKS)
    return socket
