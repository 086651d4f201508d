"""The page that a run of `make observe` writes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, NamedTuple

from scripts.rules import promtool
from tests.observe.judge import Answer
from tests.observe.prometheus import EVERY

_WITHOUT = ("- No operator.",)
_WITH = (
    "- An operator with a real API server. A stand-in marks the pods ready. One container exits",
    "  repeatedly.",
)


class Seen(NamedTuple):
    panels: list[Answer]
    records: list[Answer]
    alerts: list[Answer]
    rules: Mapping[str, Mapping[str, Any]]
    series: Mapping[str, int]
    """How many each process has."""


class Told(NamedTuple):
    command: str
    what: list[str]
    """Markdown list of the processes and the load."""


def faults(seen: Seen) -> list[str]:
    """Rules that Prometheus could not evaluate, and answers that are not numbers."""
    found = [
        f"{name}: {rule.get('lastError', '')}"
        for name, rule in seen.rules.items()
        if rule["health"] != "ok"
    ]
    found += [each.where for each in _all(seen) if each.series and not each.finite]
    return found


def summary(seen: Seen) -> str:
    lines = [
        f"{kind}: {len(answers)} asked, {sum(not each.finite for each in answers)} without a number"
        for kind, answers in _kinds(seen)
    ]
    return "\n".join([*lines, *(f"fault: {each}" for each in faults(seen))])


def told(options: Namespace) -> Told:
    return Told(
        command="make observe",
        what=[
            f"- Two services on a CPU, each with a router, {options.prefill} prefill and",
            f"  {options.decode} decode workers.",
            f"- {options.clients} clients for {options.seconds:.0f} s.",
            "- The second service uses a node agent and prefix fetch.",
            *(_WITHOUT if options.no_operator else _WITH),
        ],
    )


def page(seen: Seen, how: Told, day: str) -> str:
    """Markdown: the counts, every expression without a number and why, and how alerts stood."""
    lines = [
        "# Panels and rules against a real Prometheus",
        "",
        f"Result of `{how.command}` on {day}. Prometheus {promtool.VERSION} scraped and evaluated",
        f"every {EVERY}. Each expression was then queried over HTTP.",
        "",
        *how.what,
        "",
        "| kind | expressions | finite result | no result |",
        "| --- | --- | --- | --- |",
    ]
    for kind, answers in _kinds(seen):
        good = sum(bool(each.finite) for each in answers)
        lines.append(f"| {kind} | {len(answers)} | {good} | {len(answers) - good} |")
    bad = [name for name, rule in seen.rules.items() if rule["health"] != "ok"]
    lines += ["", f"Rules with evaluation errors: {', '.join(bad) or 'none'}.", ""]
    for state in ("pending", "firing"):
        names = [name for name, rule in seen.rules.items() if rule.get("state") == state]
        lines.append(f"Alerts {state}: {', '.join(names) or 'none'}.")
    counts = ", ".join(f"{count} of {pod}" for pod, count in sorted(seen.series.items()))
    lines += ["", f"Series: {counts}.", "", "## Without a result", ""]
    if all(each.finite for each in _all(seen)):
        return "\n".join([*lines, "None."]) + "\n"
    lines += ["| where | kind | reason |", "| --- | --- | --- |"]
    for kind, answers in _kinds(seen):
        empty = dict.fromkeys((each.where, each.reason) for each in answers if not each.finite)
        lines += [f"| {where} | {kind} | {reason} |" for where, reason in empty]
    return "\n".join(lines) + "\n"


def _kinds(seen: Seen) -> list[tuple[str, list[Answer]]]:
    return [
        ("queries of panels", seen.panels),
        ("recording rules", seen.records),
        ("series of alerts", seen.alerts),
    ]


def _all(seen: Seen) -> list[Answer]:
    return [each for _, answers in _kinds(seen) for each in answers]
