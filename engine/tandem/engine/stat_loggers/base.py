"""What a stat logger is."""

from __future__ import annotations

from typing import Protocol

from tandem.engine.scheduler.stats import SchedulerStats, StepStats
from tandem.engine.stat_loggers.report import Report


class StatLogger(Protocol):
    """Told in the engine's thread, between two steps: what takes long there holds tokens up."""

    def observe(self, stats: StepStats, now: SchedulerStats) -> None:
        """A step is over: what happened since the last call, and what lives there now."""
        ...

    def log(self, report: Report) -> None:
        """An interval is over."""
        ...

    def shutdown(self, report: Report) -> None:
        """The engine ends; the report is of its whole time. Called once."""
        ...
