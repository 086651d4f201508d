"""docs/reference/alerts.md: every alert with its severity and what it says, from the chart."""

from __future__ import annotations

import re

from scripts.reference.table import MADE, code, table
from scripts.rules import chart

_HEAD = f"""# Alerts

{MADE}
Each alert has a runbook with its meaning, its likely cause, commands and remedies. In commands
`NAME` is an LLMService and `ROUTER` the Service of its routers. If the router has API keys, add
`-H "Authorization: Bearer KEY"` to `curl`. [Metrics and alerts](../observability.md) explains how
to enable alerts.
"""


def page() -> str:
    """The whole page."""
    rows = (
        (
            f"[{name}](../runbooks/{name}.md)",
            code(rule["labels"]["severity"]),
            rule.get("for", "at once"),
            re.sub(r"{{ \$(?:labels\.)?(\w+)[^}]*}}", r"*\1*", rule["annotations"]["summary"]),
        )
        for name, rule in sorted(chart.alerts().items())
    )
    return "\n".join([_HEAD, table(("alert", "severity", "after", "meaning"), rows)])
