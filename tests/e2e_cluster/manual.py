"""Commands of docs/install.md and docs/operations.md by section: the first line of a block states
whether the cluster's suite runs it."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = (DOCS / "install.md", DOCS / "operations.md")
RUN, NOT_RUN = "sh run", "sh not-run"
_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sections() -> dict[str, list[tuple[str, str]]]:
    """Kind and text of the blocks under each title, in order."""
    found = {}
    for page in PAGES:
        for part in page.read_text().split("\n## ")[1:]:
            title, _, text = part.partition("\n")
            found[title] = [(kind.strip(), script) for kind, script in _BLOCK.findall(text)]
    return found
