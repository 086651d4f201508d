"""Ports for what tests start, which nothing else takes between their choice and their use.

Neither the kernel for a connection, nor ``tandem up`` beside it, nor another of pytest's processes
or another run of the tests: each process has a block of its own, in which a port's turn comes again
late, so that a killed process finds its port again.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import cache
from itertools import cycle, islice

from tandem.cli.serve.listening import FIRST, LOOPBACK

LOWEST = 6_000
SIZE = 160
BLOCKS = (FIRST - LOWEST) // SIZE
"""From ``FIRST`` on ``free_ports`` draws, and above that the kernel; below are other programs' and
the defaults of Tandem's own, but for those of the router, which are in one of the last blocks."""


def own_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on now; the turns of others follow. Fails where the
    process's block has not so many."""
    _, turns = _block()
    found = list(islice(filter(_is_free, islice(turns, SIZE)), count))
    assert len(found) == count, f"of a block of {SIZE} ports {len(found)} are free, not {count}"
    return found


@cache
def _block() -> tuple[socket.socket, Iterator[int]]:
    """What claims a block while this process lives, and the block's ports again and again."""
    claim = socket.socket(socket.AF_UNIX)
    for number in range(BLOCKS):
        try:
            claim.bind(f"\0tandem-tests-ports-{number}")
        except OSError:
            continue
        return claim, cycle(range(LOWEST + number * SIZE, LOWEST + (number + 1) * SIZE))
    claim.close()
    raise AssertionError(f"each of {BLOCKS} blocks of ports is another process's")


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
