"""docs/reference/alerts.md: every alert with its severity and what it says, from the chart."""

from __future__ import annotations

import re

from scripts.reference.table import MADE, code, table
from scripts.rules import chart

_HEAD = f"""# Alerts

{MADE}
Each has a runbook: what it means, who is at fault, where to look, what to do. In their commands
`NAME` is an LLMService and `ROUTER` the Service of its routers; where there is an API key, give it
to `curl` as `-H "Authorization: Bearer KEY"`. How alerts are switched on is in
[observability.md](../observability.md).
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
    return "\n".join([_HEAD, table(("alert", "severity", "after", ""), rows)])
