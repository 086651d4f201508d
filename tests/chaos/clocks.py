"""Clocks of processes that are started: monotonic time that is days away from everybody else's.

As after a node's reboot, or on another machine: no two processes may compare such times, and
whatever is remembered of a process that was there before is from another clock.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

_NEW_TIME = 0x80
"""CLONE_NEWTIME of linux/sched.h."""
_OFFSETS = Path("/proc/self/timens_offsets")


def set_clock(ahead: float) -> None:
    """Processes that this thread starts from now on have clocks so many seconds ahead of the
    system's (CLOCK_MONOTONIC and CLOCK_BOOTTIME; the time of day is the same). Linux keeps that of
    the main thread alone. Raises OSError without the right to: CAP_SYS_ADMIN."""
    assert threading.current_thread() is threading.main_thread(), "the offsets are its own"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_TIME):
        code = ctypes.get_errno()
        raise OSError(code, f"no clock of its own for a process: {os.strerror(code)}")
    _OFFSETS.write_text(f"monotonic {int(ahead)} 0\nboottime {int(ahead)} 0\n")
