"""How many files and sockets this process may have open: a link takes four or five of them.

The usual soft limit of 1,024 ends a router at 250 workers, in the middle of whatever needs the next
descriptor. Each process of Tandem raises it once, as it starts, as far as it may.
"""

from __future__ import annotations

import resource

from tandem.protocol.errors import TandemError

ENOUGH = 1 << 20
"""More is of no use, and some programs walk through all that they may have."""
LEAST = 1024
"""Below this not even a small fleet can be served."""


class TooFewDescriptors(TandemError):
    """The process may not open as many files as it needs."""


def raise_descriptor_limit(least: int = LEAST) -> int:
    """Raise the soft limit on open files to the hard one (or to ENOUGH); the limit as it is now.

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
    return now
