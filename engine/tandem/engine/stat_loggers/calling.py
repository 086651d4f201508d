"""Any function as a stat logger."""

from __future__ import annotations

from collections.abc import Callable

from tandem.engine.scheduler.stats import SchedulerStats, StepStats
from tandem.engine.stat_loggers.report import Report


class CallableStatLogger:
    """Calls it with each interval's report, and with the final one (``report.final``)."""

    def __init__(self, function: Callable[[Report], object]) -> None:
        self._function = function

    def observe(self, stats: StepStats, now: SchedulerStats) -> None:
        """The report says it all."""

    def log(self, report: Report) -> None:
        """Call it."""
        self._function(report)

    def shutdown(self, report: Report) -> None:
        """Call it for the last time."""
        self._function(report)
