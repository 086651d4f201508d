"""Says in a line what the engine did, for whoever reads logs."""

from __future__ import annotations

import logging

from tandem.engine.scheduler.stats import SchedulerStats, StepStats
from tandem.engine.stat_loggers.report import Report

logger = logging.getLogger(__name__)


class LoggingStatLogger:
    """A line for each interval in which anything was there, and one for the first quiet one."""

    def __init__(self) -> None:
        self._was_idle = True

    def observe(self, stats: StepStats, now: SchedulerStats) -> None:
        """The report says it all."""

    def log(self, report: Report) -> None:
        """Write the line."""
        if not (report.is_idle and self._was_idle):
            logger.info("%s", line_of(report))
        self._was_idle = report.is_idle

    def shutdown(self, report: Report) -> None:
        """Write what it came to."""
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
            line_of(report),
        )


def line_of(report: Report) -> str:
    """Throughput, what runs and waits, KV, hits, hand-offs."""
    words = [
        f"prompt {report.prompt_tokens_per_s:.1f} tokens/s",
        f"generation {report.generated_tokens_per_s:.1f} tokens/s",
        f"running {report.num_running}",
        f"waiting {report.num_waiting}",
        f"KV {report.kv_cache_usage:.1%}",
    ]
    if report.hit_rate is not None:
        words.append(f"prefix hits {report.hit_rate:.1%}")
    if report.done.handed_over:
        words.append(f"handed over {report.handed_over_per_s:.2f} requests/s")
    if report.done.external_tokens:
        words.append(f"KV brought for {report.brought_tokens_per_s:.1f} tokens/s")
    if report.done.preemptions:
        words.append(f"{report.done.preemptions} preemptions")
    return ", ".join(words)
