"""Boards as pictures where no Grafana is at hand: each panel's answers over time, a page each."""

from __future__ import annotations

import math
import re
import tempfile
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path

from scripts.dashboards import boards
from scripts.dashboards.panels import Board, Panel, Query
from tests.observe.prometheus import Prometheus, Series
from tests.screens.chromium import Page, browser

SECONDS, POINTS = 60.0, 60
_WIDTH, _HEIGHT = 300, 110
_SHOWN = 4
"""Legends of a panel that have a place."""
_COLOURS = ("#3f7ad6", "#cf8a1a", "#2e9c68", "#c2476a", "#7a5bd0", "#2b9fb5")
_STATE_COLOURS, _STATE_WORDS = {1.0: "#3f7ad6", 0.0: "#cf8a1a"}, {1.0: "true", 0.0: "false"}
_STYLE = """body{margin:16px;background:#f3f5f9;font:12px 'DejaVu Sans',sans-serif;color:#1a2130}
h1{font-size:18px;margin:0 0 4px}h2{font-size:14px;margin:14px 0 6px}
.row{display:grid;grid-template-columns:repeat(4,1fr);gap:10px}
.panel{background:#fff;border:1px solid #dde3ec;border-radius:6px;padding:8px 10px;min-height:150px}
.panel b{font-size:12px}.number{font-size:26px;margin-top:30px}.none{color:#8a92a3;margin-top:30px}
.legend{font-size:10px;color:#5a6374;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}"""


def take(prometheus: Prometheus, folder: Path) -> list[Path]:
    """A picture a board, ``board-NAME.png``, of what Prometheus answers now."""
    pages = {board.name: page(prometheus, board) for board in boards.BOARDS}
    found = []
    with tempfile.TemporaryDirectory() as name, browser() as shown:
        for board, html in pages.items():
            file = Path(name) / f"{board}.html"
            file.write_text(html)
            found.append(folder / f"board-{board}.png")
            _shoot(shown, file, found[-1])
    return found


def page(prometheus: Prometheus, board: Board) -> str:
    until = time.time()
    parts = [f"<!doctype html><meta charset=utf-8><style>{_STYLE}</style>"]
    parts.append(f"<h1>{escape(board.title)}</h1>{escape(board.description)}")
    for row in board.rows:
        parts.append(f"<h2>{escape(row.title)}</h2><div class=row>")
        parts += [_panel(prometheus, panel, until) for panel in row.panels]
        parts.append("</div>")
    return "".join(parts)


def _panel(prometheus: Prometheus, panel: Panel, until: float) -> str:
    lines = []
    for query in panel.queries:
        expression = boards.plain(query.expression)
        found = prometheus.over(expression, until - SECONDS, until, SECONDS / POINTS)
        lines += [(_legend(query, each.labels), each) for each in found]
    if not lines:
        content = "<div class=none>no series in this run</div>"
    elif panel.number:
        content = f"<div class=number>{_number(lines[0][1].points[-1][1])} {_unit(panel)}</div>"
    elif panel.states:
        content = "".join(states_of(legend, series, until) for legend, series in lines)
    else:
        lines.sort(key=lambda line: -_largest(line[1]))
        content = _chart(lines, until, _unit(panel))
    return f"<div class=panel><b>{escape(panel.title)}</b>{content}</div>"


def _largest(series: Series) -> float:
    """Lines that say something have their legends shown first."""
    return max((value for _, value in series.points if math.isfinite(value)), default=0.0)


def states_of(legend: str, series: Series, until: float) -> str:
    """A line of one series: its words, and a bar whose colour is its value at each time."""
    width = _WIDTH / POINTS
    bars = "".join(
        f'<rect x="{_WIDTH * (1 - (until - when) / SECONDS) - width:.1f}" '
        f'width="{width + 0.5:.1f}" height="6" fill="{_STATE_COLOURS.get(value, "#8a92a3")}"/>'
        for when, value in series.points
    )
    word = _STATE_WORDS.get(series.points[-1][1], "unknown")
    box = f'<svg viewBox="0 0 {_WIDTH} 6" width="100%">{bars}</svg>'
    return f"<div class=legend>{escape(legend)}: {word}</div>{box}"


def _chart(lines: list[tuple[str, Series]], until: float, unit: str) -> str:
    """Lines from 0 to the largest value, and the first few legends with their last values."""
    values = [value for _, series in lines for _, value in series.points if math.isfinite(value)]
    top = max([*values, 0.0]) or 1.0
    drawn, legends = [], []
    for number, (legend, series) in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(
            f"{_WIDTH * (1 - (until - when) / SECONDS):.1f},"
            f"{_HEIGHT * (1 - max(0.0, value) / top):.1f}"
            for when, value in series.points
            if math.isfinite(value)
        )
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        if number < _SHOWN:
            last = _number(series.points[-1][1])
            mark = f'<span style="color:{colour}">&#9644;</span>'
            legends.append(f"<div class=legend>{mark} {escape(legend or 'all')}: {last}</div>")
    if len(lines) > _SHOWN:
        legends.append(f"<div class=legend>and {len(lines) - _SHOWN} more</div>")
    head = f"<div class=legend>to {_number(top)} {unit}</div>"
    box = f'<svg viewBox="0 -2 {_WIDTH} {_HEIGHT + 4}" width="100%">{"".join(drawn)}</svg>'
    return head + box + "".join(legends)


def _legend(query: Query, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), query.legend)


def _unit(panel: Panel) -> str:
    return "" if panel.unit == "short" else escape(panel.unit)


def _number(value: float) -> str:
    for size, word in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:.3g}"


def _shoot(shown: Page, file: Path, picture: Path) -> None:
    shown.prefer("light")
    shown.size(1280, 800)
    shown.open(file.as_uri())
    shown.size(1280, shown.run("document.documentElement.scrollHeight"))
    time.sleep(0.5)
    shown.screenshot(picture)
