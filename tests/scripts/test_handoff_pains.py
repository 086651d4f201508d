"""docs/handoff-pains.md names tests that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "handoff-pains.md"
_NAMED = re.compile(r"`(tests/[a-z0-9_/]+\.py)::(\w+)`")


def test_every_test_that_is_named_is_there():
    """A test that is renamed or dropped takes its row along."""
    found = _NAMED.findall(PAGE.read_text())
    missing = [
        f"{file}::{name}" for file, name in found if f"def {name}(" not in (ROOT / file).read_text()
    ]
    assert missing == []
    assert len(found) > 40


def test_every_row_names_a_test():
    """A row without one is a wish."""
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| [a-zA-Z0-9]", line)]
    rows = [line for line in rows if not line.startswith(("| thread", "| row"))]
    assert len(rows) == 14 + 7
    assert [line for line in rows if not _NAMED.search(line)] == []
