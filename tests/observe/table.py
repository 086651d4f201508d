"""The page of alerts and the faults that fired them: rows, each with the day of its run.

A run of a choice of alerts replaces their rows and leaves the others as they were.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from scripts.rules import chart, promtool
from tests.observe.prometheus import EVERY

_ROW = re.compile(r"^\| (\w+) \| (.+?) \| (\S+) \| (.+?) \| (\d{4}-\d\d-\d\d) \| \[.*\|$")
NEVER = "did not fire"
NOT_FIRED = {
    "TandemAnswerBudgetSlow": "requires a fault of an hour and a window of three days",
    "TandemFirstTokenBudgetSlow": "requires a fault of an hour and a window of three days",
    "TandemAnswersContradict": "requires two builds that compute differently",
    "TandemLinkQuarantined": "requires bytes that change in transfer",
    "TandemSlotsQuarantined": "requires a network read that never ends",
    "TandemLeasesHeld": "requires a decode worker that neither fetches nor gives up for 15 min",
    "TandemOffloadLoadsFail": "requires unreadable host memory",
}
"""What no fault here makes, and why; their rules are tried by promtool (tests/observability)."""


class Row(NamedTuple):
    """An alert, and when it was seen firing after its fault."""

    alert: str
    fault: str
    wait: str
    """The rule's own (``for``), as it was in that run."""
    seconds: str
    """Until it fired, or that it did not."""
    day: str


def read(path: Path) -> dict[str, Row]:
    """Rows of a page by alert; of a page that is not there, none."""
    if not path.is_file():
        return {}
    found = (_ROW.match(line) for line in path.read_text().splitlines())
    rows = (Row(*match.groups()) for match in found if match)
    return {row.alert: row for row in rows if row.alert in chart.alerts()}


def page(rows: Iterable[Row], settings: Mapping[str, object], seconds: Mapping[str, str]) -> str:
    """Markdown: what fired by which fault, and what was not made to. ``settings`` are those of the
    chart's rules that were not its own, ``seconds`` the waits of rules that were shortened."""
    changed = ", ".join(f"`{name}: {value}`" for name, value in settings.items())
    waits = ", ".join(f"{alert} {wait}" for alert, wait in seconds.items())
    lines = [
        "# Alerts fired by faults",
        "",
        "`make alerts` injects faults into services with a router, a prefill and a decode worker",
        "under load. `make alerts-operator` injects faults into operators with a real API server",
        "and Kubernetes' controllers; a stand-in sets the pods' status.",
        f"Prometheus {promtool.VERSION} scrapes and evaluates every {EVERY}.",
        "",
        f"Changed settings of the rules: {changed}.",
        f"Changed waits: {waits or 'none'}.",
        "",
        "Seconds are from the fault until the alert fires, including the rule's wait (`for`).",
        "A fault that exists at the start counts from the first scrape.",
        "",
        "| alert | fault | `for` | seconds | day | runbook |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows = sorted(rows)
    lines += [f"| {' | '.join(row)} | {_link(row.alert)} |" for row in rows]
    lines += ["", "## Not fired by a fault", ""]
    lines += ["`make rules` tests these rules with synthetic series.", ""]
    lines += ["| alert | reason | runbook |", "| --- | --- | --- |"]
    for alert in sorted(set(chart.alerts()) - {row.alert for row in rows}):
        why = NOT_FIRED.get(alert, "not run yet")
        lines.append(f"| {alert} | {why} | {_link(alert)} |")
    return "\n".join(lines) + "\n"


def _link(alert: str) -> str:
    return f"[{alert}](runbooks/{alert}.md)"
