"""Table of the last calls of a router, with a bar of each call's time by owner. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from tandem.cli.explained import plain

Json = Mapping[str, Any]

WIDTH = 40
"""Columns of a bar, which covers a whole call of any duration."""
_STYLES = {"client": "blue", "router": "magenta", "prefill": "yellow", "decode": "green"}
_BAD = 400


def calls_table(calls: Sequence[Json]) -> Table:
    """Return a table with a row for each call, the latest first."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("call", no_wrap=True, overflow="ellipsis", max_width=26)
    table.add_column("status", no_wrap=True)
    for name in ("in", "out", "first token", "in all"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(_legend(), no_wrap=True)
    for each in calls:
        first = each["first_token_ms"]
        table.add_row(
            literal(f"{each['path'].removeprefix('/v1/')} {each['request_id'][:8]}"),
            _status(each),
            f"{each['num_prompt_tokens']:,}",
            f"{each['num_tokens']:,}",
            "" if first is None else f"{first:,.1f} ms",
            f"{each['total_ms']:,.1f} ms",
            bar_of(each),
        )
    return table


def literal(text: str, style: str = "") -> Text:
    """Return a cell with text from outside, whose markup and control characters have no effect."""
    return Text(plain(text), style)


def bar_of(call: Json) -> Text:
    """Return a bar of ``WIDTH`` equal time slices, each in the colour of its longest owner."""
    total = max(call["total_ms"], 1e-9)
    shares: list[dict[str, float]] = [{} for _ in range(WIDTH)]
    for owner, _, begin, length in call["parts"]:
        _spread(shares, owner, begin / total * WIDTH, (begin + length) / total * WIDTH)
    text = Text()
    for each in shares:
        owner = max(each, key=lambda name: each[name], default="")
        text.append("█" if owner else " ", _STYLES.get(owner, "dim"))
    return text


def _spread(shares: list[dict[str, float]], owner: str, begin: float, end: float) -> None:
    """Add an interval to the columns that it covers."""
    for column in range(max(0, int(begin)), min(WIDTH, int(end) + 1)):
        covered = min(end, column + 1) - max(begin, column)
        if covered > 0:
            shares[column][owner] = shares[column].get(owner, 0.0) + covered


def _status(call: Json) -> Text:
    if call["running"]:
        return Text("runs", "cyan")
    status = call["status"]
    return Text(str(status or ""), "red" if status is None or status >= _BAD else "green")


def _legend() -> Text:
    text = Text()
    for owner, style in _STYLES.items():
        text.append("█ ", f"not dim {style}").append(f"{owner}  ", "dim")
    return text
