"""What `make observe` calls a fault, and that it asks a real Prometheus."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.rules import chart, promtool
from tests.observe import judge, report
from tests.observe.prometheus import Prometheus


def test_a_number_that_is_none_is_a_fault() -> None:
    """Also a rule that Prometheus could not evaluate; an expression about nothing is told only."""
    number = judge.Answer("Board: Good", "x", series=2, finite=1)
    none = judge.Answer("Board: Bad", "0 / 0", series=1, finite=0)
    empty = judge.Answer("Board: Empty", "x", series=0, finite=0, missing=("x",))
    rules = {"R": {"health": "err", "lastError": "many-to-many"}, "S": {"health": "ok"}}

    seen = report.Seen([number, none, empty], [], [], rules)

    assert report.faults(seen) == ["R: many-to-many", "Board: Bad"]
    assert number.reason == ""
    assert none.reason == "no finite number"
    assert empty.reason == "no series yet: `x`"


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
    assert not prometheus.ready()
