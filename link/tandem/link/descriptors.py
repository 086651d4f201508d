"""How many files and sockets this process may have open: a link takes four or five of them.

The usual soft limit of 1,024 ends a router at 250 workers, in the middle of whatever needs the next
descriptor. Each process of Tandem raises it once, as it starts, as far as it may.

Nor does it stand still for one later. Linux doubles the table of a process's descriptors when the
64th, 128th, 256th and so on is opened, and where it has threads, that call waits until no processor
looks at the old one (synchronize_rcu): 6 to 16 ms in which a router sent nobody a token. The table
is never made smaller, so it is made large at once.
"""

from __future__ import annotations

import fcntl
import os
import resource
from contextlib import suppress

from tandem.protocol.errors import TandemError

ENOUGH = 1 << 20
"""More is of no use, and some programs walk through all that they may have."""
LEAST = 1024
"""Below this not even a small fleet can be served."""

ROOM = 1 << 14
"""Descriptors that the table has room for from the start: 128 KiB."""


class TooFewDescriptors(TandemError):
    """The process may not open as many files as it needs."""


def raise_descriptor_limit(least: int = LEAST) -> int:
    """Raise the soft limit on open files to the hard one (or to ENOUGH), and make room for ROOM of
    them, if so many are allowed; the limit as it is now.

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
    """Have the table hold ``count`` descriptors; where that is not to be had, it grows on."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.close(fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, count - 1))
    finally:
        os.close(null)
