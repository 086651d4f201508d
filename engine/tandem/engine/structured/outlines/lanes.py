"""Two compile processes: one for texts that are quick, as most are, and one for those that are not.

A text that is not compiled in its moment is begun again in the other process, so that those behind
it wait a moment for it and no longer, and only few may be there at a time.
"""

from __future__ import annotations

from threading import BoundedSemaphore

from tandem.engine.structured.grammar import NotNow, Waits, untold
from tandem.engine.structured.outlines.compile_process import CompileProcess, OvertimeError
from tandem.engine.structured.outlines.jobs import Job
from tandem.engine.structured.outlines.tables import Tables

QUICK_SECONDS = 0.75
SLOW_SECONDS = 4.0
MAX_SLOW = 2
"""Texts that take longer than a moment, at a time; the gate waits for no more of them."""


class BusyError(NotNow):
    """Others that take long are compiled: the same text may be taken later."""


class Lanes:
    """Any number of threads."""

    def __init__(
        self, *, quick_seconds: float = QUICK_SECONDS, slow_seconds: float = SLOW_SECONDS
    ) -> None:
        self.quick, self.slow = CompileProcess(), CompileProcess()
        self._seconds = (quick_seconds, slow_seconds)
        self._places = BoundedSemaphore(MAX_SLOW)

    @property
    def is_preparing(self) -> bool:
        """Whether a text waits for the first process of either kind to begin."""
        return self.quick.is_beginning or self.slow.is_beginning

    def compile(self, job: Job, waits: Waits = untold) -> Tables:
        """The table of a job; see Compiler for ``waits``. Raises GrammarError."""
        quick, slow = self._seconds
        try:
            return self.quick.compile(job, quick, waits)
        except OvertimeError:
            pass
        if not self._places.acquire(blocking=False):
            raise BusyError(f"what compiles within {quick:g} s while {MAX_SLOW} others take longer")
        try:
            return self.slow.compile(job, slow, waits)
        finally:
            self._places.release()

    def start(self) -> None:
        """Have the process for most texts begin."""
        self.quick.start()

    def close(self) -> None:
        """End both. May be called twice."""
        self.quick.close()
        self.slow.close()
