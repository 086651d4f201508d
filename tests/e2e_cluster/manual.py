"""docs/install.md as sections of commands: each block says in its first line whether it is run."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "install.md"
RUN, NOT_RUN = "sh run", "sh not-run"
_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sections() -> dict[str, list[tuple[str, str]]]:
    """Kind and text of the blocks under each title, in order."""
    found = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        found[title] = [(kind.strip(), script) for kind, script in _BLOCK.findall(text)]
    return found
