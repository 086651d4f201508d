"""A histogram that observes every token, at a fraction of the library's cost.

``prometheus_client`` takes a lock for a bucket and one for the sum, and walks the bounds in Python.
The router's is observed once a token and in one thread, so a search and two additions are enough.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenHistogram(Collector):
    """Observed in one thread; scraped in any, which may see a sum without its last observation."""

    kind = "histogram"

    def __init__(self, name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]):
        """``bounds`` are upper, ascending, inclusive; one without end is added."""
        self.name = name
        self.documentation = text
        self.labels = labels
        self._bounds = bounds
        self._names = [*map(floatToGoString, bounds), "+Inf"]
        self._children: dict[tuple[str, ...], TokenTimes] = {}

    def child(self, *values: str) -> TokenTimes:
        """Return the observations under these values of the labels."""
        return self._children.setdefault(values, TokenTimes(self._bounds))

    def totals(self) -> tuple[int, float]:
        """Return the number of observations over all labels, and their sum."""
        children = list(self._children.values())
        return sum(sum(each.counts) for each in children), sum(each.sum for each in children)

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        family = HistogramMetricFamily(self.name, self.documentation, labels=self.labels)
        for values, child in list(self._children.items()):
            cumulative = accumulate(map(float, child.counts))
            buckets = list(zip(self._names, cumulative, strict=True))
            family.add_metric(values, buckets=buckets, sum_value=child.sum)
        yield family


class TokenTimes:
    """Observations under one set of labels."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Counts of each bucket alone, the last without an upper bound."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value
