"""The table of alerts and faults: what is said of each alert, and what a run of some changes."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from scripts.rules import chart, promtool
from tests.observe import faults, firing, operator_faults, operators, table
from tests.operator.control_plane import missing


def test_every_alert_has_a_fault_or_a_reason() -> None:
    """One of them, and none of an alert that is not there."""
    made = [faults.fired(), operator_faults.fired(), set(table.NOT_FIRED)]
    assert set().union(*made) == set(chart.alerts())
    assert sum(map(len, made)) == len(chart.alerts())


def test_a_run_of_some_leaves_the_rows_of_others(tmp_path: Path) -> None:
    """Rows are read back as they were written; a new one replaces that of its alert."""
    page = tmp_path / "page.md"
    silent, stale = "TandemRouterSilent", "TandemOperatorStale"
    firing.write(page, {(silent, "no power"): 12.4, (stale, "none"): None}, "2026-11-24")
    firing.write(page, {(stale, "writes are refused"): 901.0}, "2026-11-25")

    rows = table.read(page)

    assert rows == {
        silent: table.Row(silent, "no power", "0", "12", "2026-11-24"),
        stale: table.Row(stale, "writes are refused", "5m", "901", "2026-11-25"),
    }
    assert table.read(tmp_path / "none.md") == {}


def test_shortened_waits_are_told(tmp_path: Path) -> None:
    """In the row, and by name above it."""
    page = tmp_path / "page.md"
    firing.write(page, {("TandemKeysOld", "the keys are not rotated"): 140.0}, "2026-11-25")
    assert chart.alerts()["TandemKeysOld"]["for"] == "1h"
    assert table.read(page)["TandemKeysOld"].wait == "2m"
    assert "Changed waits: TandemKeysOld 2m." in page.read_text()


@pytest.mark.parametrize("flags", [["--only", "TandemRouterSilent"], ["--only", "X", "--operator"]])
def test_an_alert_that_no_fault_makes_is_refused(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its name and what there is, before anything is raised."""
    monkeypatch.setattr(sys, "argv", ["firing", *flags])
    with pytest.raises(SystemExit):
        firing.main()
    assert f"--only: {flags[1]}: none of Tandem" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.skipif(bool(missing()), reason="`make cluster` builds the API server")
@pytest.mark.skipif(promtool.find("prometheus") is None, reason="make observe builds Prometheus")
def test_a_router_whose_node_is_lost_fires_its_alert(tmp_path: Path) -> None:
    """A real operator takes it out, and a real Prometheus fires; no other stage is raised."""
    with ExitStack() as open_:
        found = operators.watch(tmp_path, {"TandemRouterSilent"}, 120.0, open_)
    assert [alert for alert, _ in found] == ["TandemRouterSilent"]
    assert None not in found.values()
