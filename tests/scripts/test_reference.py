"""docs/reference says what the code says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from scripts.reference.__main__ import FOLDER, pages
from scripts.reference.flags import groups

from tandem.base.settings import settings_of
from tandem.cli.__main__ import COMMANDS
from tandem.router.config import RouterConfig

made = cache(pages)


def test_pages_are_what_the_code_makes_of_them() -> None:
    """`make reference-pages` was run after the last change, and no page is left over."""
    assert {path.name for path in FOLDER.iterdir()} == set(made())
    for name, text in made().items():
        assert (FOLDER / name).read_text() == text, name


def rows() -> Iterator[tuple[str, list[str]]]:
    """Cells of every row below a head, with the page."""
    for name, text in made().items():
        for line in re.sub(r"\\\|", "", text).splitlines():
            if line.startswith("| `"):
                yield name, [cell.strip() for cell in line.strip("|").split("|")]


def test_every_row_has_a_meaning() -> None:
    """A flag, series, field or word that nobody explains is of no use to a reader."""
    empty = [f"{name}: {cells[0]}" for name, cells in rows() if not cells[-1]]
    assert empty == []


def test_every_command_with_settings_is_there() -> None:
    """Under its own name, with all flags of its classes."""
    titles = " ".join(title for title, _ in groups())
    without = ["chat", "top", "explain", "run-batch"]  # settings
    assert [name for name in COMMANDS if name not in titles] == without
    flags = {cells[0].strip("`") for name, cells in rows() if name == "flags.md"}
    assert {f"--{each.name.replace('_', '-')}" for each in settings_of(RouterConfig)} <= flags
