"""Cases of tests/observability/cases as the file that ``promtool test rules`` reads.

A case is written in short: series by name, when to look, and what is seen then; where that is
about other settings than the chart's defaults, with these. Each alert has one case or more in which
it fires and in which it does not; each recording rule has its value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from scripts.rules.chart import ROOT

CASES = ROOT / "tests" / "observability" / "cases"
_AT, _EVERY = "20m", "1m"


class Ground(NamedTuple):
    """Settings that the cases of one file share."""

    every: str
    """How often rules are evaluated."""
    settings: tuple[tuple[str, object], ...]
    """Of the chart's rules, other than the defaults."""


def cases() -> list[dict[str, Any]]:
    """All cases, of all files."""
    found = []
    for path in sorted(CASES.glob("*.yaml")):
        found += yaml.safe_load(path.read_text())
    return found


def by_ground() -> dict[Ground, list[dict[str, Any]]]:
    """Tests of all cases, by what they have in common: days are not walked through by the
    minute."""
    found: dict[Ground, list[dict[str, Any]]] = {}
    for case in cases():
        ground = Ground(case.get("interval", _EVERY), tuple(case.get("settings", {}).items()))
        found.setdefault(ground, []).extend(_tests(case))
    return found


def test_file(rules: Path, ground: Ground, tests: list[dict[str, Any]]) -> dict[str, Any]:
    """Return promtool's file: tests of one ground, about the rules at ``rules``, made of its
    settings."""
    return {
        "rule_files": [str(rules)],
        "evaluation_interval": ground.every,
        "fuzzy_compare": True,
        "tests": tests,
    }


def _tests(case: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if "record" in case:
        value = {"value": case["value"], "labels": case["labels"]}
        rounded = f"round({case['record']}, 0.000001)"
        yield _test(case["record"], case["series"], case, rounded, [value])
        return
    expression = f'count(ALERTS{{alertname="{case["alert"]}",alertstate="firing"}})'
    for word, samples in (("fires", [{"value": 1, "labels": "{}"}]), ("rests", [])):
        for series in case[word]:
            yield _test(f"{case['alert']} {word}", series, case, expression, samples)


def _test(
    name: str,
    series: Mapping[str, str],
    case: Mapping[str, Any],
    expression: str,
    samples: list[dict[str, Any]],
) -> dict[str, Any]:
    inputs = [{"series": key, "values": str(values)} for key, values in series.items()]
    asked = {"expr": expression, "eval_time": case.get("at", _AT), "exp_samples": samples}
    return {
        "name": name,
        "interval": case.get("interval", _EVERY),
        "input_series": inputs,
        "promql_expr_test": [asked],
    }
