"""What `make observe` calls a fault, and that it asks a real Prometheus."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from scripts.rules import chart, promtool
from tests.observe import judge, picture, report
from tests.observe.prometheus import Prometheus, Series


def test_a_number_that_is_none_is_a_fault() -> None:
    """Also a rule that Prometheus could not evaluate; an expression about nothing is told only."""
    number = judge.Answer("Board: Good", "x", series=2, finite=1)
    none = judge.Answer("Board: Bad", "0 / 0", series=1, finite=0)
    empty = judge.Answer("Board: Empty", "x", series=0, finite=0, missing=("x",))
    rules = {"R": {"health": "err", "lastError": "many-to-many"}, "S": {"health": "ok"}}

    seen = report.Seen([number, none, empty], [], [], rules, {})

    assert report.faults(seen) == ["R: many-to-many", "Board: Bad"]
    assert number.reason == ""
    assert none.reason == "no finite number"
    assert empty.reason == "no series yet: `x`"


def test_states_have_a_colour_and_a_word_each() -> None:
    """True, false and unknown, as Grafana's board has them; the word is the newest one's."""
    points = [(0.0, 1.0), (1.0, 0.0), (2.0, -1.0)]
    drawn = picture.states_of("ns/demo Ready <x>", Series({}, points), 60.0)
    assert [colour in drawn for colour in ("#3f7ad6", "#cf8a1a", "#8a92a3")] == [True] * 3
    assert "ns/demo Ready &lt;x&gt;: unknown" in drawn
    assert "Ready: true" in picture.states_of("Ready", Series({}, points[:1]), 60.0)


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
