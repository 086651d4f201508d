"""The page that a run of `make observe` writes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, NamedTuple

from scripts.rules import promtool
from tests.observe.judge import Answer
from tests.observe.prometheus import EVERY

_WITHOUT = ("no operator ran.",)
_WITH = (
    "and, beside a real API server, an operator with a service whose pods a stand-in for nodes",
    "makes ready; one of its containers ends again and again.",
)


class Seen(NamedTuple):
    """What one run asked for and got."""

    panels: list[Answer]
    records: list[Answer]
    alerts: list[Answer]
    rules: Mapping[str, Mapping[str, Any]]
    series: Mapping[str, int]
    """How many each process has."""


class Told(NamedTuple):
    """How a page was made."""

    command: str
    what: list[str]
    """Lines that go on after "scraped and evaluated every so many seconds"."""


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
    """One line a kind."""
    lines = [
        f"{kind}: {len(answers)} asked, {sum(not each.finite for each in answers)} without a number"
        for kind, answers in _kinds(seen)
    ]
    return "\n".join([*lines, *(f"fault: {each}" for each in faults(seen))])


def told(options: Namespace) -> Told:
    """How `make observe` made it."""
    return Told(
        command="make observe",
        what=[
            "two services on a CPU, one of them placed by forecasts, each of a router,",
            f"{options.prefill} prefill and {options.decode} decode workers",
            f"under {options.clients} clients for {options.seconds:.0f} s, and the workers of the",
            "latter at an agent of their node and with prefixes that they pull from each other;",
            *(_WITHOUT if options.no_operator else _WITH),
        ],
    )


def page(seen: Seen, how: Told, day: str) -> str:
    """Markdown: the counts, every expression without a number and why, and how alerts stood."""
    lines = [
        "# Every panel and rule, asked of a real Prometheus",
        "",
        f"Made by `{how.command}` on {day}: Prometheus {promtool.VERSION} scraped and evaluated",
        f"every {EVERY}",
        *how.what,
        "Each expression was then asked for over HTTP.",
        "",
        "| asked for | expressions | with a finite answer | without |",
        "| --- | --- | --- | --- |",
    ]
    for kind, answers in _kinds(seen):
        good = sum(bool(each.finite) for each in answers)
        lines.append(f"| {kind} | {len(answers)} | {good} | {len(answers) - good} |")
    bad = [name for name, rule in seen.rules.items() if rule["health"] != "ok"]
    lines += ["", f"Rules that Prometheus could not evaluate: {', '.join(bad) or 'none'}.", ""]
    for state in ("pending", "firing"):
        names = [name for name, rule in seen.rules.items() if rule.get("state") == state]
        lines.append(f"Alerts that were {state}: {', '.join(names) or 'none'}.")
    counts = ", ".join(f"{count} of {pod}" for pod, count in sorted(seen.series.items()))
    lines += ["", f"Series: {counts}.", "", "## Without an answer", ""]
    if all(each.finite for each in _all(seen)):
        return "\n".join([*lines, "None."]) + "\n"
    lines += ["| where | kind | why |", "| --- | --- | --- |"]
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
