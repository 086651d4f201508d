"""All boards, in the order in which somebody looks who was called."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.dashboards import capacity, engine, operator, pair, router, service
from scripts.dashboards.panels import Board, Panel

BOARDS: tuple[Board, ...] = (
    service.BOARD,
    pair.BOARD,
    engine.BOARD,
    router.BOARD,
    operator.BOARD,
    capacity.BOARD,
)
_VALUES = {"__rate_interval": "1m", "namespace": ".*", "service": ".*"}
_VALUES |= {"gpu_hour_price": "2.50", "gpus": "1"}


def panels() -> Iterator[tuple[Board, Panel]]:
    """Every panel with its board."""
    return ((board, panel) for board in BOARDS for row in board.rows for panel in row.panels)


def plain(expression: str) -> str:
    """An expression as Grafana sends it, with values for its variables."""
    for name, value in _VALUES.items():
        expression = expression.replace(f"${name}", value)
    return expression


def queries() -> Iterator[tuple[str, str]]:
    """Board and panel as words, with each expression."""
    for board, panel in panels():
        for query in panel.queries:
            yield f"{board.title.removeprefix('Tandem: ')}: {panel.title}", query.expression
