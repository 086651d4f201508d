"""ZMQ sockets for links: any number of them, bounded frames, no lingering.

A socket belongs to one thread; ``curve`` decides which peers may connect.
"""

from __future__ import annotations

from typing import TypeAlias

import zmq

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
