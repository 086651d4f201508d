"""Metrics of the engine in this process, as plain values: ``LLM.get_metrics()``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


@dataclass(frozen=True, slots=True)
class Metric:
    """One series: a name, and the labels that distinguish it from other series of that name."""

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A value that only grows."""

    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A current value."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """Cumulative counts of values by bucket bound, and their total count and sum."""

    count: int
    sum: float
    buckets: Mapping[str, int] = field(default_factory=dict)


def read(families: Iterable[Family]) -> list[Metric]:
    """Return every series of these kinds. Names are those of a scrape; counters lack _total."""
    return [metric for family in families for metric in _series(family)]


def _series(family: Family) -> Iterator[Metric]:
    if family.type == "histogram":
        yield from _histograms(family)
        return
    for sample in family.samples:
        if family.type == "gauge":
            yield Gauge(sample.name, sample.labels, sample.value)
        elif family.type == "counter" and sample.name.endswith("_total"):
            yield Counter(family.name, sample.labels, sample.value)


def _histograms(family: Family) -> Iterator[Metric]:
    """Yield one histogram per set of labels, built from its samples."""
    found: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        parts = found.setdefault(tuple(labels.items()), {})
        ending = sample.name.removeprefix(family.name)
        parts[sample.labels["le"] if ending == "_bucket" else ending] = sample.value
    for key, parts in found.items():
        count, total = int(parts.pop("_count", 0)), parts.pop("_sum", 0.0)
        parts.pop("_created", None)
        buckets = {bound: int(value) for bound, value in parts.items()}
        yield Histogram(family.name, dict(key), count, total, buckets)
