"""All stat loggers of one engine: each is told at its time, and none can end the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tandem.engine.scheduler.stats import SchedulerStats, StepStats
from tandem.engine.stat_loggers.base import StatLogger
from tandem.engine.stat_loggers.report import Report
from tandem.engine.stat_loggers.totals import Totals

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


class StatLoggers:
    """Called in the engine's thread."""

    def __init__(
        self,
        loggers: Sequence[StatLogger] = (),
        *,
        interval: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A report goes to all of them every ``interval`` seconds in which the engine is called."""
        self.totals = Totals()
        """What was done since the start; kept without loggers, too."""
        self._loggers = list(loggers)
        self._interval = interval
        self._clock = clock
        self._began = self._told_at = self._called_at = clock()
        self._told = Totals()
        self._seen: SchedulerStats | None = None
        """What lived there at the last call."""
        self._is_over = False

    def put(self, logger: StatLogger) -> None:
        """One more, told first."""
        self._loggers.insert(0, logger)

    def observe(self, stats: StepStats, make_stats: Callable[[], SchedulerStats]) -> None:
        """A step is over; ``make_stats`` is asked only if there is somebody to tell."""
        if not self._loggers:
            self.totals.add(stats)
            return
        now = self._clock()
        last = self._seen
        if last is not None and _is_empty(last) and now - self._called_at >= self._interval:
            # The engine slept: what went before is told as it was, and the sleep is nobody's rate.
            self._report(self._called_at, last)
            self._told_at = now
        self.totals.add(stats)
        self._called_at, self._seen = now, make_stats()
        seen = self._seen
        self._tell(lambda each: each.observe(stats, seen))
        if now - self._told_at >= self._interval:
            self._report(now, seen)

    def _report(self, until: float, seen: SchedulerStats) -> None:
        """Tell of the interval that ends."""
        seconds = until - self._told_at
        if seconds <= 0:
            return
        report = Report.of(self._told, self.totals, seen, seconds, final=False)
        self._told, self._told_at = replace(self.totals), until
        self._tell(lambda each: each.log(report))

    def shutdown(self, make_stats: Callable[[], SchedulerStats]) -> None:
        """Tell the final statistics. May be called twice."""
        if self._is_over or not self._loggers:
            return
        self._is_over = True
        seconds = self._clock() - self._began
        report = Report.of(Totals(), self.totals, make_stats(), seconds, final=True)
        self._tell(lambda each: each.shutdown(report))

    def _tell(self, what: Callable[[StatLogger], None]) -> None:
        """Tell each; who fails is told nothing more."""
        for each in list(self._loggers):
            try:
                what(each)
            except Exception:
                logger.exception("%s failed, and is told nothing more", type(each).__name__)
                self._loggers.remove(each)


def _is_empty(seen: SchedulerStats) -> bool:
    """Whether nothing lived there, so that no step was due."""
    return not (seen.running or seen.waiting or seen.deferred)
