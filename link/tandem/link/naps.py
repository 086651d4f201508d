"""How a thread that sleeps for moments at a time gets up, and on, when it should."""

from __future__ import annotations

import ctypes
import select
import sys
from collections.abc import Sequence
from functools import cache

_PR_SET_TIMERSLACK = 29
SWITCH_SECONDS = 0.0005
"""For which a thread that computes may keep another from the interpreter that has just woken."""


class _Watched(ctypes.Structure):
    """struct pollfd."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Duration(ctypes.Structure):
    """struct timespec."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def nap_precisely() -> None:
    """Let naps of the calling thread end when they should: Linux adds up to 50 us to each."""
    if sys.platform == "linux":
        _library().prctl(_PR_SET_TIMERSLACK, 1)


def switch_soon() -> None:
    """Let threads of this process have the interpreter when they have waited for half a
    millisecond: Python's own 5 would be added to each of a hand-off's hops beside a step loop that
    is at work."""
    sys.setswitchinterval(SWITCH_SECONDS)


def sleep_on(descriptors: Sequence[int], seconds: float) -> bool:
    """Sleep until one of the descriptors is readable or the time is over, to some microseconds;
    whether one is. ``select.poll`` and epoll sleep whole milliseconds, and more of them than were
    asked for."""
    if sys.platform != "linux":
        return bool(select.select(descriptors, (), (), seconds)[0])
    watched = (_Watched * len(descriptors))(
        *(_Watched(each, select.POLLIN) for each in descriptors)
    )
    whole = int(seconds)
    duration = _Duration(whole, int((seconds - whole) * 1e9))
    found = _library().ppoll(
        watched, ctypes.c_ulong(len(descriptors)), ctypes.byref(duration), ctypes.c_void_p(None)
    )
    return bool(found > 0)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
