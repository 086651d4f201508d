"""Who gives its blocks back when they run out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.engine.request import Request


def choose_victim(running: Sequence[Request], first: int) -> int:
    """Index of the request to preempt so that ``running[first]`` may grow, or ``first`` itself.

    ``running`` is sorted, best first: the victim is the last one (lowest priority, then latest
    arrival) whose blocks are not promised to a peer. Nobody before ``first`` is touched, so the
    first of all always gets on.
    """
    for index in range(len(running) - 1, first, -1):
        if running[index].preemptible:
            return index
    return first
