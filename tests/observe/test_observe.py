"""What `make observe` calls a fault, and that it asks a real Prometheus."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from scripts.rules import chart, promtool
from tests.observe import judge
from tests.observe.prometheus import Prometheus


@pytest.mark.skipif(promtool.find("prometheus") is None, reason="make observe builds Prometheus")
def test_a_prometheus_without_targets(tmp_path: Path) -> None:
    """It takes all rules, answers nothing, and refuses what is no expression."""
    with Prometheus.running(tmp_path, []) as prometheus:
        assert prometheus.targets_up() == 0
        assert set(prometheus.rules()) == {*chart.alerts(), *chart.records()}
        answers = judge.alerts(prometheus)
        assert {each.where for each in answers} == set(chart.alerts())
        assert not any(each.finite for each in answers)
        with pytest.raises(ValueError, match="parse error"):
            prometheus.ask("rate(")
        (one,) = prometheus.over("vector(2)", time.time() - 10, time.time(), 5)
        assert [value for _, value in one.points] == [2.0, 2.0, 2.0]
        assert prometheus.counted() == {}
        assert prometheus.firing() == set(), "no leader is pending for two minutes"
    assert not prometheus.ready()
