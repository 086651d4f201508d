"""Names in docs/reference/parameters.md, which ``scripts.reference`` makes from the code."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "parameters.md"


def listed(title: str, api: str) -> set[str]:
    """Return the parameters of an API in the table under a title."""
    section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `([\w.\[\]]+)` \| ([\w, ]+) \|", section, re.MULTILINE)
    return {name for name, apis in found if api in apis.split(", ")}
