"""What an engine in this process has counted, as plain values."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Summary
from prometheus_client import Counter as SeriesCounter
from prometheus_client import Histogram as SeriesHistogram
from tests.engine_plan.sim import SimExecutor

from tandem.engine.stat_loggers import Report
from tandem.llm import LLM
from tandem.llm.llm_engine import Counter, Gauge, Histogram, Metric, read
from tandem.protocol.errors import InvalidParameter


def test_series_become_values() -> None:
    """Each set of labels is one; kinds that nobody asks for are left out."""
    registry = CollectorRegistry()
    counter = SeriesCounter("a:things", "Things.", ("kind",), registry=registry)
    counter.labels("x").inc(2)
    counter.labels("y").inc(3)
    histogram = SeriesHistogram("a:s", "Seconds.", ("k",), buckets=(1, 2), registry=registry)
    histogram.labels("z").observe(1.5)
    Summary("a:no", "No.", registry=registry).observe(1)
    assert read(registry.collect()) == [
        Counter("a:things", {"kind": "x"}, 2.0),
        Counter("a:things", {"kind": "y"}, 3.0),
        Histogram("a:s", {"k": "z"}, 1, 1.5, {"1.0": 0, "2.0": 1, "+Inf": 1}),
    ]


def only(metrics: list[Metric], name: str) -> Metric:
    (found,) = [each for each in metrics if each.name == name]
    return found


def test_an_llm_tells_what_it_counted(smollm2: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By vLLM's names, at any time; a function hears the final statistics, and so does the log."""
    caplog.set_level(logging.INFO, "tandem.engine.stat_loggers")
    reports: list[Report] = []
    with LLM(
        str(smollm2),
        executor=SimExecutor(64),
        device="cpu",
        block_size=16,
        stat_loggers=[reports.append],
        log_stats_interval=3600,
    ) as llm:
        params = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
        llm.generate([[5] * 40, [6] * 40], params, use_tqdm=False)
        metrics = llm.get_metrics()
        assert metrics == llm.engine.get_metrics()

    tokens = only(metrics, "vllm:generation_tokens")
    assert isinstance(tokens, Counter)
    assert tokens.value == 10
    assert isinstance(only(metrics, "vllm:num_requests_running"), Gauge)
    first = only(metrics, "vllm:time_to_first_token_seconds")
    assert isinstance(first, Histogram)
    assert first.count == first.buckets["+Inf"] == 2
    assert [(report.final, report.done.generated_tokens) for report in reports] == [(True, 10)]
    assert "final statistics: 2 requests ended" in caplog.text


def test_an_interval_has_bounds(smollm2: Path) -> None:
    for wrong in (-1.0, float("nan"), 1e9):
        with pytest.raises(InvalidParameter, match="log_stats_interval"):
            LLM(str(smollm2), executor=SimExecutor(64), device="cpu", log_stats_interval=wrong)
