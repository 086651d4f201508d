"""Descriptors over a Unix socket: bounded in number, checked and named.

Descriptors that a message may not have are closed.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from collections.abc import Iterable

from tandem.kvtransfer.errors import TransportError

_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_CREDENTIALS = struct.Struct("3i")
_SO_COOKIE = 57
"""Value from asm-generic/socket.h; Python has no name for it."""
_NAME = struct.Struct("<QQ8s")
_CUT = socket.MSG_TRUNC | socket.MSG_CTRUNC


def receive(sock: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int]]:
    """Return received bytes and descriptors, which the caller closes and child processes do not
    inherit. Raises TransportError for more bytes or descriptors than allowed, BlockingIOError if
    nothing came, OSError."""
    room = socket.CMSG_LEN(most * array("i").itemsize)
    data, beside, flags, _ = sock.recvmsg(nbytes, room, _CLOSE_ON_EXEC)
    files = array("i")
    for level, kind, payload in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(payload[: len(payload) - len(payload) % files.itemsize])
    if flags & _CUT or len(files) > most:
        close_all(files)
        raise TransportError(f"a message is too long or has more than {most} descriptors")
    return data, list(files)


def close_all(files: Iterable[int]) -> None:
    """Close descriptors."""
    for each in files:
        os.close(each)


def stream_of(descriptor: int) -> socket.socket:
    """Return a received descriptor as a connected non-blocking Unix stream; take it over, also on
    an error. Raises TransportError if it is something else."""
    try:
        found = socket.socket(fileno=descriptor)
    except OSError as error:
        os.close(descriptor)
        raise TransportError(f"a descriptor is not a socket: {error}") from error
    if (found.family, found.type) != (socket.AF_UNIX, socket.SOCK_STREAM):
        found.close()
        raise TransportError("a descriptor is a socket of another kind")
    found.setblocking(False)
    return found


def name_of(sock: socket.socket) -> bytes:
    """Return bytes that name an open socket of this machine uniquely in every process."""
    found = os.fstat(sock.fileno())
    cookie = b""
    if hasattr(socket, "SO_PEERCRED"):  # Linux
        cookie = sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
    return _NAME.pack(found.st_dev, found.st_ino, cookie)


def user_of(sock: socket.socket) -> int | None:
    """Return the user of the process at the other end; None if the system does not report it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user
