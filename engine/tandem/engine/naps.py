"""Short sleeps: how a thread waits that must not hold a core, and must not be late by much.

Unlike a loop that asks without a pause it lets the process's other threads run, and its core stays
out of deep sleep, from which it would come back slowly.
"""

from __future__ import annotations

import ctypes
import sys
import time

NAP_SECONDS = 2e-5
_PR_SET_TIMERSLACK = 29


def nap() -> None:
    """Sleep for a moment."""
    time.sleep(NAP_SECONDS)


def nap_precisely() -> None:
    """Let naps of the calling thread end when they should: Linux adds up to 50 us to each."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
