"""Ends the process of a leader that has not renewed in time, even if its threads hang.

A renewal is a call, and calls may hang: in a server that sends a byte a second, in a file, in a
lock. So the thread that counts the time does nothing else. If the interpreter itself is stuck, a
thread without it (faulthandler's) ends the process a little later, still before the Lease is free.
Started by ``leader``.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

EXIT_LOST = 3
"""Exit status of a leader that could not renew; 1 where its interpreter was stuck."""


def end_process() -> None:
    """Log the stack of every thread, and end at once."""
    logger.error("the Lease could not be renewed: ending")
    faulthandler.dump_traceback()
    os._exit(EXIT_LOST)


class Watchdog:
    """``feed`` before the time is over, or ``lost`` is called, once."""

    def __init__(self, lost: Callable[[], None], *, by_force_after: float | None) -> None:
        """``by_force_after`` seconds past the deadline the process ends without ``lost``; None
        leaves it at ``lost``."""
        self._lost = lost
        self._by_force_after = by_force_after
        self._deadline: float | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._silent = None if by_force_after is None else open(os.devnull, "w")  # noqa: SIM115
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def feed(self, deadline: float) -> None:
        """Set the deadline to ``deadline``, by the monotonic clock."""
        with self._changed:
            if self._stopped:
                return
            self._deadline = deadline
            self._changed.notify()
            if self._by_force_after is not None and self._silent is not None:
                left = max(0.001, deadline - time.monotonic() + self._by_force_after)
                faulthandler.dump_traceback_later(left, exit=True, file=self._silent)

    def stop(self) -> None:
        """Stop for good: a renewal that comes late has no effect."""
        with self._changed:
            self._stopped = True
            self._deadline = None
            self._changed.notify()
            if self._silent is not None:
                faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self._is_over():
            if self._stopped:
                return
        self._lost()

    def _is_over(self) -> bool:
        """Wait for what comes first: a change or the deadline; whether that is over."""
        with self._changed:
            if self._deadline is None:
                self._changed.wait()
                return False
            left = self._deadline - time.monotonic()
            if left > 0:
                self._changed.wait(left)
                return False
            self._deadline = None
            return True
