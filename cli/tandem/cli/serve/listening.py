"""Check that the router can listen at its address."""

from __future__ import annotations

import errno
import ipaddress
import random
import socket
import urllib.request
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

from tandem.protocol.errors import InvalidParameter, TandemError

LOOPBACK = "127.0.0.1"
FIRST = 10_000
"""Lowest port used, above well-known ones."""
_RANGE_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_FIRST_OF_CONNECTIONS = 32_768
_ENOUGH = 1000


def free_ports(count: int, *, but: Collection[int] = ()) -> list[int]:
    """Return free ports of the loopback outside the kernel's range for connections.

    ``but``: ports that are about to be used. Raises TandemError if there are not enough.
    """
    candidates = range(FIRST, first_of_connections())
    with ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(candidates, len(candidates)):
            if len(found) == count:
                break
            if port in but:
                continue
            held = stack.enter_context(socket.socket())
            with suppress(OSError):
                held.bind((LOOPBACK, port))
                found.append(port)
    if len(found) < count:
        raise TandemError(f"of {candidates} only {len(found)} ports are free, {count} are needed")
    return found


def first_of_connections() -> int:
    """Return the first port of the kernel's range, or a usual one."""
    with suppress(OSError, ValueError, IndexError):
        first = int(_RANGE_OF_CONNECTIONS.read_text().split()[0])
        if first >= FIRST + _ENOUGH:
            return first
    return _USUAL_FIRST_OF_CONNECTIONS


DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener for this machine's own processes, without a proxy."""


def mounts(url: str) -> dict[str, None]:
    """Return httpx's ``mounts`` without a proxy for the loopback."""
    host = urlsplit(url).hostname or ""
    return {f"all://[{host}]" if ":" in host else f"all://{host}": None} if _is_own(host) else {}


def _is_own(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


ASK_SECONDS = 1.0


def check_address(host: str, port: int) -> None:
    """Raise InvalidParameter if no server can listen there now."""
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
    """Return whether a program answers there: some systems let two share a port."""
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
