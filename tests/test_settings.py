"""No setting without a test: a flag that nobody tries is a flag that may do nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts.reference.flags import groups

TESTS = Path(__file__).parent
WORDS = {
    word.replace("-", "_")
    for path in TESTS.rglob("*.py")
    if path != Path(__file__)
    for word in re.findall(r"[a-z][a-z0-9_-]+", path.read_text())
}


@pytest.mark.parametrize("title", [title for title, _ in groups()])
def test_every_setting_is_named_by_a_test(title: str) -> None:
    """By its own name, as a field or as a flag; what each test shows is its own line's matter."""
    (sections,) = [sections for each, sections in groups() if each == title]
    names = {each.name for section in sections for each in section.flags()}
    assert sorted(names - WORDS) == []
