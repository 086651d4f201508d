"""Parts of a board: rows of panels, each with queries and advice."""

from __future__ import annotations

from typing import NamedTuple

OURS = 'tandem_dev_service!=""'
"""Selects by the label that only Tandem has; a plain vLLM has series of the same names."""
SERVED = f'namespace=~"$namespace",tandem_dev_service=~"$service",{OURS}'
"""Series of routers and workers of the chosen services."""
ROUTER = f'{SERVED},engine=""'
"""Of routers, where workers have series of the same name."""
WORKER = f'{SERVED},engine!=""'
OPERATED = 'llmservice_namespace=~"$namespace",llmservice=~"$service"'
"""Series by which the operator tells of the chosen services."""
SERVICE = "namespace, tandem_dev_service"
POD = "pod"


class Query(NamedTuple):
    """One expression with the words of its legend."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """A picture over time: lines, or states side by side; or the newest value as a number."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    description: str
    """What it shows, and what to do when it looks bad."""
    number: bool = False
    states: bool = False
    """Values are 1 (true), 0 (false) or -1 (unknown)."""


class Row(NamedTuple):
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


class Board(NamedTuple):
    """One board."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]
    prices: bool = False
    """Has variables for the price of an accelerator's hour and how many there are."""


def panel(
    title: str,
    unit: str,
    description: str,
    *queries: tuple[str, str],
    number: bool = False,
    states: bool = False,
) -> Panel:
    """A panel of expressions with their legends."""
    found = tuple(Query(expression, legend) for expression, legend in queries)
    return Panel(title, unit, found, description, number, states)


def rate(name: str, by: str, labels: str = SERVED) -> str:
    """Events a second, summed by labels."""
    return f"sum by ({by}) (rate({name}{{{labels}}}[$__rate_interval]))"


def gauge(name: str, by: str, labels: str = SERVED, how: str = "sum") -> str:
    """A gauge, summed by labels."""
    return f"{how} by ({by}) ({name}{{{labels}}})"


def quantile(share: float, name: str, by: str, labels: str = SERVED) -> str:
    """A quantile of a histogram."""
    inner = f"rate({name}_bucket{{{labels}}}[$__rate_interval])"
    keys = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, sum by ({keys}) ({inner}))"


def quantiles(name: str, labels: str = SERVED) -> tuple[tuple[str, str], ...]:
    """The median, and the slowest twentieth and hundredth."""
    shares = ((0.5, "half"), (0.95, "95 %"), (0.99, "99 %"))
    return tuple((quantile(share, name, "", labels), word) for share, word in shares)


def mean(name: str, by: str, labels: str = SERVED) -> str:
    """The mean of a histogram."""
    return f"{rate(f'{name}_sum', by, labels)} / {rate(f'{name}_count', by, labels)}"
