"""Stat loggers: told in time, of the right stretch, and never the engine's end."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.engine_plan.builders import Clock, config_of, params_of, request_of
from tests.engine_plan.sim import SimExecutor

from tandem.engine.core.engine_core import EngineCore
from tandem.engine.metrics import EngineMetrics
from tandem.engine.scheduler.stats import FinishedRecord, SchedulerStats, StepStats
from tandem.engine.stat_loggers import (
    FunctionStatLogger,
    LoggingStatLogger,
    PrometheusStatLogger,
    Report,
    StatLoggers,
    Totals,
    stat_loggers_of,
)

BUSY = SchedulerStats(3, 1, 1, 1, 0, 0, 0, 50, 0.5)
QUIET = SchedulerStats(0, 0, 0, 0, 0, 0, 0, 100, 0.0)
STEP: dict[str, Any] = {
    "prompt_tokens": 40,
    "queried_tokens": 40,
    "hit_tokens": 10,
    "generated_tokens": 5,
}


class Told:
    """Keeps what it is told; fails where it is told to."""

    def __init__(self, fails_at: str = "") -> None:
        self.steps: list[StepStats] = []
        self.reports: list[Report] = []
        self.finals: list[Report] = []
        self.fails_at = fails_at

    def observe(self, stats: StepStats, now: SchedulerStats) -> None:
        self.steps.append(stats)
        assert self.fails_at != "observe"

    def log(self, report: Report) -> None:
        self.reports.append(report)
        assert self.fails_at != "log"

    def shutdown(self, report: Report) -> None:
        self.finals.append(report)
        assert self.fails_at != "shutdown"


def ended(reason: str) -> FinishedRecord:
    return FinishedRecord(reason, 10, 5, None, 1, 0, 10, 0.1, 0.1, 0.1, 0.3)


def steps(loggers: StatLoggers, clock: Clock, count: int, seconds: float, **stats: Any) -> None:
    """So many steps, each after so many seconds."""
    for _ in range(count):
        clock.now += seconds
        loggers.observe(StepStats(**{**STEP, **stats}), lambda: BUSY)


def test_each_interval_is_told_once() -> None:
    """With what happened in it, as rates; the final report is of all of it, and told once."""
    clock, told = Clock(), Told()
    loggers = StatLoggers([told], interval=10.0, clock=clock)
    steps(loggers, clock, 25, 1.0)
    assert len(told.steps) == 25
    assert [report.seconds for report in told.reports] == [10.0, 10.0]
    report = told.reports[1]
    assert (report.prompt_tokens_per_s, report.generated_tokens_per_s) == (40.0, 5.0)
    assert (report.hit_rate, report.kv_cache_usage) == (0.25, 0.5)
    assert (report.num_running, report.num_waiting, report.final) == (3, 3, False)
    for _ in range(2):
        loggers.shutdown(lambda: QUIET)
    (final,) = told.finals
    assert (final.final, final.seconds, final.done.generated_tokens) == (True, 25.0, 125)


def test_a_sleep_is_nobodys_rate() -> None:
    """What went before it is told as it was; the next interval begins when the engine wakes."""
    clock, told = Clock(), Told()
    loggers = StatLoggers([told], interval=10.0, clock=clock)
    steps(loggers, clock, 4, 1.0)
    loggers.observe(StepStats(), lambda: QUIET)
    clock.now += 500.0
    steps(loggers, clock, 11, 1.0)
    assert [report.seconds for report in told.reports] == [4.0, 10.0]
    assert [report.generated_tokens_per_s for report in told.reports] == [5.0, 5.5]


def test_a_step_longer_than_the_interval_is_told() -> None:
    clock, told = Clock(), Told()
    loggers = StatLoggers([told], interval=1.0, clock=clock)
    steps(loggers, clock, 3, 4.0)
    assert [report.done.generated_tokens for report in told.reports] == [5, 5, 5]


@pytest.mark.parametrize("moment", ["observe", "log", "shutdown"])
def test_who_fails_is_told_nothing_more(moment: str, caplog: pytest.LogCaptureFixture) -> None:
    """And the others are, and so is whoever reads the log."""
    clock, bad, good = Clock(), Told(moment), Told()
    loggers = StatLoggers([bad, good], interval=2.0, clock=clock)
    steps(loggers, clock, 6, 1.0)
    loggers.shutdown(lambda: QUIET)
    assert (len(good.steps), len(good.reports), len(good.finals)) == (6, 3, 1)
    assert len(bad.steps) == {"observe": 1, "log": 2, "shutdown": 6}[moment]
    assert caplog.text.count("Told failed and is removed") == 1


def test_without_loggers_only_totals_are_kept() -> None:
    loggers = StatLoggers()

    def nobody() -> SchedulerStats:
        raise AssertionError("asked")

    loggers.observe(StepStats(**STEP, finished=[ended("handed_over"), ended("stop")]), nobody)
    loggers.shutdown(nobody)
    assert loggers.totals == Totals(
        prompt_tokens=40,
        queried_tokens=40,
        hit_tokens=10,
        generated_tokens=5,
        finished=2,
        handed_over=1,
    )


def test_a_line_says_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    """What is nothing is left out, and so are quiet intervals after the first."""
    caplog.set_level(logging.INFO)
    clock = Clock()
    loggers = StatLoggers([LoggingStatLogger()], interval=10.0, clock=clock)
    loggers.observe(StepStats(), lambda: QUIET)
    more = {"finished": [ended("handed_over")], "external_tokens": 20, "preemptions": 1}
    steps(loggers, clock, 1, 5.0, **more)
    steps(loggers, clock, 1, 5.0)
    for _ in range(3):
        clock.now += 9.0
        loggers.observe(StepStats(), lambda: QUIET)
        clock.now += 1.0
        loggers.observe(StepStats(), lambda: QUIET)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        (
            "prompt 8.0 tokens/s, generation 1.0 tokens/s, running 3, waiting 3, KV 50.0%, "
            "prefix hits 25.0%, handed over 0.10 requests/s, KV brought for 2.0 tokens/s, "
            "1 preemptions"
        ),
        "prompt 0.0 tokens/s, generation 0.0 tokens/s, running 0, waiting 0, KV 0.0%",
    ]
    loggers.shutdown(lambda: QUIET)
    assert "final statistics: 1 requests ended (1 handed over) in 40.0 s" in caplog.text


def test_an_engine_tells_all_of_its_loggers() -> None:
    """Objects, functions and series, of the same steps; the end is told when it closes."""
    registry, told = CollectorRegistry(), Told()
    reports: list[Report] = []
    series = PrometheusStatLogger(EngineMetrics(registry, model_name="tiny", max_model_len=1000))
    loggers = stat_loggers_of([told, series, reports.append], log_interval=0.0)
    core = EngineCore.launch(config_of(), SimExecutor(64), stat_loggers=loggers)
    core.add(request_of("a", [1] * 40, params=params_of(max_tokens=5, ignore_eos=True)))
    while core.has_work:
        core.step()
    load = core.load_report()
    assert (load.computed_tokens, load.generated_tokens) == (40, 5)
    core.close()
    core.close()

    assert sum(stats.generated_tokens for stats in told.steps) == 5
    labels = {"model_name": "tiny", "engine": "0"}
    assert registry.get_sample_value("vllm:generation_tokens_total", labels) == 5
    (final,) = reports
    assert [final] == told.finals
    assert (final.final, final.done.finished, final.done.generated_tokens) == (True, 1, 5)
    assert not told.reports
    assert "generation" in str(final)


def test_a_function_gets_each_report() -> None:
    clock = Clock()
    reports: list[Report] = []
    loggers = StatLoggers([FunctionStatLogger(reports.append)], interval=1.0, clock=clock)
    steps(loggers, clock, 2, 1.0)
    loggers.shutdown(lambda: QUIET)
    assert [report.final for report in reports] == [False, False, True]
