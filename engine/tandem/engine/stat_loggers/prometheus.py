"""An engine's series in a registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from tandem.engine.metrics import EngineMetrics
from tandem.engine.scheduler.stats import SchedulerStats, StepStats
from tandem.engine.stat_loggers.report import Report


class PrometheusStatLogger:
    """Keeps ``metrics``; nothing is to be done at intervals, for who scrapes asks by himself."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self.metrics = metrics

    @classmethod
    def of(
        cls, registry: CollectorRegistry, *, model_name: str, max_model_len: int
    ) -> PrometheusStatLogger:
        """With series of its own in ``registry``."""
        return cls(EngineMetrics(registry, model_name=model_name, max_model_len=max_model_len))

    def observe(self, stats: StepStats, now: SchedulerStats) -> None:
        """Add what happened."""
        self.metrics.observe(stats, now)

    def log(self, report: Report) -> None:
        """The series say it at any time."""

    def shutdown(self, report: Report) -> None:
        """The series stay as they are."""
