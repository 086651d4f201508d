"""Check that the router can listen at its address, before any other work."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress

from tandem.cli.ports import LOOPBACK
from tandem.protocol.errors import InvalidParameter

ASK_SECONDS = 1.0


def check_address(host: str, port: int) -> None:
    """Raise InvalidParameter for ``host`` or ``port`` if no server can listen there now."""
    bare = host.strip("[]")
    try:
        found = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InvalidParameter("host", host, f"an address of this machine ({error})") from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise _explained(host, port, error) from error
    if _is_answered(LOOPBACK if bare in ("0.0.0.0", "::", "") else bare, port):
        raise _taken(host, port)


def _is_answered(host: str, port: int) -> bool:
    """Return whether a program answers there. Some systems let two programs share a port."""
    with suppress(OSError), socket.create_connection((host, port), ASK_SECONDS):
        return True
    return False


def _explained(host: str, port: int, error: OSError) -> InvalidParameter:
    if error.errno == errno.EADDRINUSE:
        return _taken(host, port)
    if error.errno == errno.EADDRNOTAVAIL:
        return InvalidParameter("host", host, "an address of this machine")
    if error.errno in (errno.EACCES, errno.EPERM):
        return InvalidParameter("port", port, "a port that this user may listen on, such as 8000")
    return InvalidParameter("port", port, f"a port that can be listened on ({error.strerror})")


def _taken(host: str, port: int) -> InvalidParameter:
    return InvalidParameter("port", port, f"a free port; another program listens on {host}:{port}")
