"""The table of alerts and faults: what is said of each alert, and what a run of some changes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from scripts.rules import chart, promtool
from tests.observe import faults, operator_faults, operators, table
from tests.operator.control_plane import missing


def test_every_alert_has_a_fault_or_a_reason() -> None:
    """One of them, and none of an alert that is not there."""
    made = [faults.fired(), operator_faults.fired(), set(table.NOT_FIRED)]
    assert set().union(*made) == set(chart.alerts())
    assert sum(map(len, made)) == len(chart.alerts())


@pytest.mark.nightly
@pytest.mark.skipif(bool(missing()), reason="`make cluster` builds the API server")
@pytest.mark.skipif(promtool.find("prometheus") is None, reason="make observe builds Prometheus")
def test_a_router_whose_node_is_lost_fires_its_alert(tmp_path: Path) -> None:
    """A real operator takes it out, and a real Prometheus fires; no other stage is raised."""
    with ExitStack() as open_:
        found = operators.watch(tmp_path, {"TandemRouterSilent"}, 120.0, open_)
    assert [alert for alert, _ in found] == ["TandemRouterSilent"]
    assert None not in found.values()
