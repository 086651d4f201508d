"""Ports for processes that are started later, or again."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path

from tandem.protocol.errors import TandemError

LOOPBACK = "127.0.0.1"
FIRST = 10_000
"""Below lie the well-known ports of other programs."""
_RANGE_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_FIRST_OF_CONNECTIONS = 32_768
_ENOUGH = 1000


def free_ports(count: int, *, but: Collection[int] = ()) -> list[int]:
    """Ports of the loopback that nobody listens on now, and that no connection is given.

    The kernel gives connections ports of a range of its own: one of those could be gone before its
    owner listens, or between a process's end and its restart. ``but``: ports that somebody is
    about to take. Raises TandemError if there are not enough.
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
    """Where the kernel's own range begins; the usual place if it leaves too little below."""
    with suppress(OSError, ValueError, IndexError):
        first = int(_RANGE_OF_CONNECTIONS.read_text().split()[0])
        if first >= FIRST + _ENOUGH:
            return first
    return _USUAL_FIRST_OF_CONNECTIONS
