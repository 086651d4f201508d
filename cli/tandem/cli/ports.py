"""Ports for processes that are started later, or restarted."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path

from tandem.protocol.errors import TandemError

LOOPBACK = "127.0.0.1"
FIRST = 10_000
"""Lowest port used. Lower ones include the well-known ports of other programs."""
_RANGE_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_FIRST_OF_CONNECTIONS = 32_768
_ENOUGH = 1000


def free_ports(count: int, *, but: Collection[int] = ()) -> list[int]:
    """Return ports of the loopback that are free now, and that the kernel assigns to no connection.

    The kernel assigns connections ports of its own range. One of those could be taken before its
    process listens, or between a process's end and its restart. ``but``: ports that are about to be
    used. Raises TandemError if there are not enough.
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
    """Return the first port of the kernel's range, or the usual one if it leaves too few below."""
    with suppress(OSError, ValueError, IndexError):
        first = int(_RANGE_OF_CONNECTIONS.read_text().split()[0])
        if first >= FIRST + _ENOUGH:
            return first
    return _USUAL_FIRST_OF_CONNECTIONS
