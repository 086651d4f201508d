"""Statistics of an engine for its log, its metrics and a program's own loggers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from tandem.engine.metrics import EngineMetrics
from tandem.engine.scheduler.stats import SchedulerStats, StepStats

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


@dataclass(slots=True)
class Totals:
    """Counters since the start of an engine."""

    prompt_tokens: int = 0
    """Prompt tokens of requests that began."""
    computed_tokens: int = 0
    external_tokens: int = 0
    queried_tokens: int = 0
    """Tokens looked up in the prefix cache."""
    hit_tokens: int = 0
    """Tokens found there."""
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    """Requests that ended here, handed over or not."""
    handed_over: int = 0
    """Requests that another worker continues."""

    def less(self, before: Totals) -> Totals:
        return Totals(
            *(getattr(self, each.name) - getattr(before, each.name) for each in fields(self))
        )

    def add(self, stats: StepStats) -> None:
        self.prompt_tokens += stats.prompt_tokens
        self.computed_tokens += stats.computed_tokens
        self.external_tokens += stats.external_tokens
        self.queried_tokens += stats.queried_tokens
        self.hit_tokens += stats.hit_tokens
        self.generated_tokens += stats.generated_tokens
        self.preemptions += stats.preemptions
        for record in stats.finished:
            self.finished += 1
            self.handed_over += record.reason == "handed_over"


@dataclass(frozen=True, slots=True)
class Report:
    """Counts of one interval, and the state at its end. The last report covers the whole time."""

    seconds: float
    final: bool
    """True if it covers the whole time of the engine."""
    done: Totals
    """Counts of these seconds."""
    now: SchedulerStats
    """State at their end."""

    @property
    def is_idle(self) -> bool:
        """Return whether nothing happened and no request is left."""
        return self.done == Totals() and not self.num_running and not self.num_waiting

    @property
    def num_running(self) -> int:
        """Return the sequences in the batch."""
        return self.now.running

    @property
    def num_waiting(self) -> int:
        """Return the sequences that wait for blocks, for KV or for a grammar."""
        return self.now.waiting + self.now.deferred

    @property
    def kv_cache_usage(self) -> float:
        """Return the share of the blocks in use, 0 to 1."""
        return self.now.cache_usage

    @property
    def prompt_tokens_per_s(self) -> float:
        """Return the prompt tokens per second of requests that began, computed here or not."""
        return self.done.prompt_tokens / self.seconds

    @property
    def generated_tokens_per_s(self) -> float:
        """Return the sampled tokens per second."""
        return self.done.generated_tokens / self.seconds

    @property
    def hit_rate(self) -> float | None:
        """Return the share of looked-up tokens that the prefix cache had; None without a lookup."""
        return self.done.hit_tokens / self.done.queried_tokens if self.done.queried_tokens else None

    @property
    def handed_over_per_s(self) -> float:
        """Return the rate of requests that another worker continues, per second."""
        return self.done.handed_over / self.seconds

    @property
    def brought_tokens_per_s(self) -> float:
        """Return the rate of prompt tokens whose KV came from elsewhere, per second."""
        return self.done.external_tokens / self.seconds

    def __str__(self) -> str:
        words = [
            f"prompt {self.prompt_tokens_per_s:.1f} tokens/s",
            f"generation {self.generated_tokens_per_s:.1f} tokens/s",
            f"running {self.num_running}",
            f"waiting {self.num_waiting}",
            f"KV {self.kv_cache_usage:.1%}",
        ]
        if self.hit_rate is not None:
            words.append(f"prefix hits {self.hit_rate:.1%}")
        if self.done.handed_over:
            words.append(f"handed over {self.handed_over_per_s:.2f} requests/s")
        if self.done.external_tokens:
            words.append(f"KV brought for {self.brought_tokens_per_s:.1f} tokens/s")
        if self.done.preemptions:
            words.append(f"{self.done.preemptions} preemptions")
        return ", ".join(words)


class StatLogger(Protocol):
    """Called in the engine's thread between two steps, so a slow call delays tokens."""

    def observe(self, stats: StepStats, now: SchedulerStats) -> None:
        """Handle the counts of a step and the state after it."""
        ...

    def log(self, report: Report) -> None:
        """Handle the report of an interval."""
        ...

    def shutdown(self, report: Report) -> None:
        """Handle the final report. Called once."""
        ...


StatFunction = Callable[[Report], object]


class FunctionStatLogger:
    """Calls a function with the report of each interval, and with the final one."""

    def __init__(self, function: StatFunction) -> None:
        self._function = function

    def observe(self, stats: StepStats, now: SchedulerStats) -> None:
        """Do nothing: the report has all counts."""

    def log(self, report: Report) -> None:
        self._function(report)

    def shutdown(self, report: Report) -> None:
        self._function(report)


class LoggingStatLogger:
    """Logs a line for each interval with work, and one for the first idle interval."""

    def __init__(self) -> None:
        self._was_idle = True

    def observe(self, stats: StepStats, now: SchedulerStats) -> None:
        """Do nothing: the report has all counts."""

    def log(self, report: Report) -> None:
        if not (report.is_idle and self._was_idle):
            logger.info("%s", report)
        self._was_idle = report.is_idle

    def shutdown(self, report: Report) -> None:
        done = report.done
        logger.info(
            "final statistics: %d requests ended (%d handed over) in %.1f s, %d prompt tokens, "
            "%d generated, %d preemptions; %s",
            done.finished,
            done.handed_over,
            report.seconds,
            done.prompt_tokens,
            done.generated_tokens,
            done.preemptions,
            report,
        )


class PrometheusStatLogger:
    """Updates the series of a registry after each step."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self.metrics = metrics

    def observe(self, stats: StepStats, now: SchedulerStats) -> None:
        self.metrics.observe(stats, now)

    def log(self, report: Report) -> None:
        """Do nothing: the series are current."""

    def shutdown(self, report: Report) -> None:
        """Do nothing: the series stay."""


class StatLoggers:
    """Calls all stat loggers of an engine, in its thread. A logger that raises is removed."""

    def __init__(
        self,
        loggers: Sequence[StatLogger] = (),
        *,
        interval: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.totals = Totals()
        """Counts since the start; kept without loggers, too."""
        self._loggers = list(loggers)
        self._interval = interval
        self._clock = clock
        self._began = self._reported_at = self._called_at = clock()
        self._reported = Totals()
        self._seen: SchedulerStats | None = None
        self._is_over = False

    def put(self, logger: StatLogger) -> None:
        """Add a logger before the others."""
        self._loggers.insert(0, logger)

    def observe(self, stats: StepStats, make_stats: Callable[[], SchedulerStats]) -> None:
        """Handle the end of a step. ``make_stats`` is only called if there are loggers."""
        if not self._loggers:
            self.totals.add(stats)
            return
        now = self._clock()
        last = self._seen
        if last is not None and _is_empty(last) and now - self._called_at >= self._interval:
            # The engine slept. The report ends with its last step, so the sleep lowers no rate.
            self._report(self._called_at, last)
            self._reported_at = now
        self.totals.add(stats)
        self._called_at, self._seen = now, make_stats()
        seen = self._seen
        self._call(lambda each: each.observe(stats, seen))
        if now - self._reported_at >= self._interval:
            self._report(now, seen)

    def _report(self, until: float, seen: SchedulerStats) -> None:
        seconds = until - self._reported_at
        if seconds <= 0:
            return
        report = Report(seconds, False, self.totals.less(self._reported), seen)
        self._reported, self._reported_at = replace(self.totals), until
        self._call(lambda each: each.log(report))

    def shutdown(self, make_stats: Callable[[], SchedulerStats]) -> None:
        """Send the final report. May be called twice."""
        if self._is_over or not self._loggers:
            return
        self._is_over = True
        seconds = max(self._clock() - self._began, 1e-9)
        report = Report(seconds, True, replace(self.totals), make_stats())
        self._call(lambda each: each.shutdown(report))

    def _call(self, method: Callable[[StatLogger], None]) -> None:
        for each in list(self._loggers):
            try:
                method(each)
            except Exception:
                logger.exception("%s failed and is removed", type(each).__name__)
                self._loggers.remove(each)


def stat_loggers_of(
    given: Sequence[StatLogger | StatFunction] = (), *, log_interval: float
) -> StatLoggers:
    """Return the given loggers and a log line every ``log_interval`` seconds; 0: no line."""
    loggers: list[StatLogger] = [
        FunctionStatLogger(each) if callable(each) else each for each in given
    ]
    if log_interval:
        loggers.append(LoggingStatLogger())
    return StatLoggers(loggers, interval=log_interval or INTERVAL_S)


def _is_empty(seen: SchedulerStats) -> bool:
    return not (seen.running or seen.waiting or seen.deferred)
