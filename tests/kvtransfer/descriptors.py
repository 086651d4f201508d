"""Descriptors of this process that are of shared memory, for tests that must leave none behind."""

from __future__ import annotations

import os
from contextlib import suppress


def of_memory() -> set[tuple[str, int]]:
    """Number and inode of each: sockets and pipes of other tests come and go beside, and memory of
    theirs that is collected late is no reason to differ from what was there before."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        with suppress(OSError):  # the listing's own is closed again
            if os.readlink(path).startswith(("/memfd:", "/dev/shm/")):
                found.add((number, os.stat(path).st_ino))
    return found
