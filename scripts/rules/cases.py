"""Cases of tests/observability/cases as the file that ``promtool test rules`` reads.

A case is written in short: series by name, when to look, and what is seen then. Each alert has one
case or more in which it fires and in which it does not; each recording rule has its value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from scripts.rules.chart import ROOT

CASES = ROOT / "tests" / "observability" / "cases"
_AT, _EVERY = "20m", "1m"


def cases() -> list[dict[str, Any]]:
    """All cases, of all files."""
    found = []
    for path in sorted(CASES.glob("*.yaml")):
        found += yaml.safe_load(path.read_text())
    return found


def test_files(rules: Path) -> dict[str, dict[str, Any]]:
    """Files by how often they evaluate, about the rules at ``rules``: days are not walked through
    by the minute."""
    found: dict[str, dict[str, Any]] = {}
    for case in cases():
        every = case.get("interval", _EVERY)
        file = found.setdefault(
            every,
            {
                "rule_files": [str(rules)],
                "evaluation_interval": every,
                "fuzzy_compare": True,
                "tests": [],
            },
        )
        file["tests"] += _tests(case)
    return found


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
