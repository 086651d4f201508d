"""Rules as the chart renders them with its default values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "tandem"

Rule = dict[str, Any]


def values() -> Mapping[str, Any]:
    """Default values of the chart's ``metrics.prometheusRule``."""
    everything = yaml.safe_load((CHART / "values.yaml").read_text())
    found: Mapping[str, Any] = everything["metrics"]["prometheusRule"]
    return found


def groups(changed: Mapping[str, object] | None = None) -> dict[str, list[Rule]]:
    """Rules by group, with the settings in their places; some may be ``changed``."""
    found = {}
    settings = {**values()["settings"], **(changed or {})}
    for path in sorted((CHART / "rules").glob("*.yaml")):
        text = path.read_text()
        for name, value in settings.items():
            text = text.replace(f"${{{name}}}", str(value))
        found[f"tandem-{path.stem.replace('_', '-')}"] = yaml.safe_load(text)
    return found


def rules() -> list[Rule]:
    """Rules of all groups."""
    return [rule for group in groups().values() for rule in group]


def alerts() -> dict[str, Rule]:
    """Alerts by name."""
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def records() -> dict[str, Rule]:
    """Recording rules by the name that they record."""
    return {rule["record"]: rule for rule in rules() if "record" in rule}


def rule_file(
    changed: Mapping[str, object] | None = None, waits: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the rules that Prometheus loads. ``changed`` are settings other than the chart's
    defaults, ``waits`` those of alerts (``for``)."""
    found = groups(changed)
    for rule in (rule for group in found.values() for rule in group):
        if (wait := (waits or {}).get(rule.get("alert", ""))) is not None:
            rule["for"] = wait
    return {"groups": [{"name": name, "rules": group} for name, group in found.items()]}
