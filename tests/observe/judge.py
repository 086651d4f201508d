"""Every expression of boards and rules, asked of a Prometheus, and why one has no answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from scripts.dashboards import boards
from scripts.reference import metrics
from scripts.rules import chart, expressions
from tests.observe.prometheus import Prometheus

_TRIES, _REST_SECONDS = 3, 5.0


class Answer(NamedTuple):
    where: str
    expression: str
    series: int
    finite: int
    missing: tuple[str, ...] = ()
    """Names in the expression of which there is no series at all."""

    @property
    def reason(self) -> str:
        """In words, why there is no number; nothing where there is one."""
        if self.finite:
            return ""
        if self.series:
            return "no finite number"
        if not self.missing:
            return "its series are there, none with these labels or values"
        names = ", ".join(f"`{name}`" for name in self.missing)
        if all(_only_operator(name) for name in self.missing):
            return f"the operator's, which this run has not: {names}"
        return f"no series yet: {names}"


def panels(prometheus: Prometheus) -> list[Answer]:
    """Answers of all queries of all panels."""
    return [
        _answer(prometheus, where, boards.plain(text))
        for where, text in sorted(set(boards.queries()))
    ]


def records(prometheus: Prometheus) -> list[Answer]:
    """Answers of all recording rules, as they were recorded."""
    return [
        _answer(prometheus, name, rule["expr"], recorded=name)
        for name, rule in chart.records().items()
    ]


def alerts(prometheus: Prometheus) -> list[Answer]:
    """An alert that rests has no answer: the series that it goes by are asked for instead."""
    return [_series_of(prometheus, name, rule["expr"]) for name, rule in chart.alerts().items()]


def settled(ask: Callable[[Prometheus], list[Answer]], prometheus: Prometheus) -> list[Answer]:
    """``ask``, again some scrapes later where there was no number: one scrape that fails leaves no
    series until the next."""
    for _ in range(_TRIES - 1):
        answers = ask(prometheus)
        if all(each.finite for each in answers):
            return answers
        time.sleep(_REST_SECONDS)
    return ask(prometheus)


def _series_of(prometheus: Prometheus, name: str, text: str) -> Answer:
    """Of all series of an alert, where each of its names has some."""
    by_name = {
        each: prometheus.ask(each)
        for each in sorted({each.name for each in expressions.read(text).selectors})
    }
    missing = tuple(each for each, values in by_name.items() if not values)
    values = [] if missing else [value for found in by_name.values() for value in found]
    return Answer(name, text, len(values), sum(map(math.isfinite, values)), missing)


def _answer(prometheus: Prometheus, where: str, text: str, recorded: str = "") -> Answer:
    values = prometheus.ask(recorded or text)
    finite = sum(map(math.isfinite, values))
    missing: tuple[str, ...] = ()
    if not values:
        named = sorted({each.name for each in expressions.read(text).selectors})
        missing = tuple(name for name in named if not prometheus.ask(name))
    return Answer(where, text, len(values), finite, missing)


@cache
def _owners() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for owner, registry in metrics.registries().items():
        for each in metrics.series(registry):
            found.setdefault(each.name, set()).add(owner)
    return found


def _only_operator(name: str) -> bool:
    """Whether no other process has the series; of a recorded one, what it is recorded from."""
    if (rule := chart.records().get(name)) is not None:
        return all(_only_operator(each.name) for each in expressions.read(rule["expr"]).selectors)
    owners: set[str] = set()
    for each in expressions.family(name):
        owners |= _owners().get(each, set())
    return bool(owners) and all("operator" in each.lower() for each in owners)
