"""Sleeps of a thread that end on time, and fast switches between threads."""

from __future__ import annotations

import ctypes
import select
import sys
from collections.abc import Sequence
from functools import cache

_PR_SET_TIMERSLACK = 29
SWITCH_SECONDS = 0.0005
"""Maximum time for which a computing thread keeps the interpreter from a thread that woke."""


class _Watched(ctypes.Structure):
    """struct pollfd."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Duration(ctypes.Structure):
    """struct timespec."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def nap_precisely() -> None:
    """Make the calling thread's sleeps precise: Linux adds up to 50 us to each."""
    if sys.platform == "linux":
        _library().prctl(_PR_SET_TIMERSLACK, 1)


def switch_soon() -> None:
    """Let waiting threads of this process run after half a millisecond instead of 5 ms."""
    sys.setswitchinterval(SWITCH_SECONDS)


def sleep_on(descriptors: Sequence[int], seconds: float) -> bool:
    """Sleep until a descriptor is readable or the time is over; return whether one is readable.

    Precise to microseconds, unlike ``select.poll`` and epoll.
    """
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
