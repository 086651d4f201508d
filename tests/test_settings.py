"""No setting without a test: a flag that nobody tries is a flag that may do nothing."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.reference.flags import groups


def test_every_setting_is_named_by_a_test() -> None:
    """By its own name, as a field or as a flag; what each test shows is its own line's matter."""
    words = {
        word.replace("-", "_")
        for path in Path(__file__).parent.rglob("*.py")
        if path != Path(__file__)
        for word in re.findall(r"[a-z][a-z0-9_-]+", path.read_text())
    }
    left = {
        title: sorted({each.name for section in sections for each in section.flags()} - words)
        for title, sections in groups()
    }
    assert not any(left.values()), left
