"""Threads that do small jobs beside the step loop: masks, and what comes before the first one.

A future for each job would cost the step loop as much as the job: here a job is put into a queue
and says itself, in its own way, that it is done.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)

Job = Callable[[], None]


class MaskThreads:
    """Begun with the first job. Any thread puts jobs."""

    def __init__(self, count: int | None = None) -> None:
        """``count``: threads; None is half of the processors, 2 to 8, since masks are made without
        the interpreter's lock."""
        self._count = count or max(2, min(8, (os.cpu_count() or 2) // 2))
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def put(self, job: Job) -> bool:
        """Have ``job`` done, the oldest first; False after the end, and it never is."""
        if not self._threads:
            self._start()
        if self._closed:
            return False
        self._jobs.put(job)
        return True

    def close(self) -> None:
        """Begin nothing more. May be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._jobs.put(None)

    def _start(self) -> None:
        with self._lock:
            if self._threads or self._closed:
                return
            self._threads = [
                threading.Thread(target=self._run, name=f"grammar-mask-{index}", daemon=True)
                for index in range(self._count)
            ]
            for each in self._threads:
                each.start()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None or self._closed:
                return
            try:
                job()
            except BaseException:  # a library's panic is no Exception
                logger.exception("a job of a grammar failed")
