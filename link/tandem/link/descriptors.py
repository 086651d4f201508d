"""Limit of open files and sockets of this process: a link takes four or five of them.

The usual soft limit of 1,024 ends a router at 250 workers, at an arbitrary call that opens a
descriptor. Each process of Tandem raises it once at start, as far as it may.

Growth of the descriptor table is avoided too. Linux doubles the table when the 64th, 128th, 256th
and so on descriptor is opened. In a process with threads, that call waits until no processor reads
the old table (synchronize_rcu): 6 to 16 ms in which a router sent no token. The table is never made
smaller, so it is made large at once.
"""

from __future__ import annotations

import fcntl
import os
import resource
from contextlib import suppress

from tandem.protocol.errors import TandemError

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
