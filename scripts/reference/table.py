"""Markdown that the pages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MADE = "Made from the code by `make reference-pages`; a test holds it to that.\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; pipes and line ends in cells are escaped."""
    lines = [_row(head), "|" + " --- |" * len(head)]
    return "\n".join([*lines, *(_row([_cell(each) for each in row]) for row in rows)]) + "\n"


def code(text: object) -> str:
    """``text`` as code, or nothing for nothing."""
    return f"`{text}`" if str(text) else ""


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
