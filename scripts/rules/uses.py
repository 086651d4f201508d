"""Uses of a metric by the name of its family, through recording rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from scripts.rules import chart, expressions

Uses = dict[str, set[str]]


def of_alerts() -> Uses:
    """Names of alerts by scraped name, or its name without the ending that a type gives it."""
    return of((name, rule["expr"]) for name, rule in chart.alerts().items())


def of(expressions_by_user: Iterable[tuple[str, str]]) -> Uses:
    """Users by name; what a recording rule is made of is used by who uses it."""
    found: Uses = {}
    records = {name: rule["expr"] for name, rule in chart.records().items()}
    for user, expression in expressions_by_user:
        for name in _scraped(expression, records):
            for each in expressions.family(name):
                found.setdefault(each, set()).add(user)
    return found


def _scraped(expression: str, records: Mapping[str, str]) -> Iterator[str]:
    for selector in expressions.read(expression).selectors:
        if selector.name in records:
            yield from _scraped(records[selector.name], records)
        else:
            yield selector.name
