"""A Prometheus histogram that takes many equal observations at once.

Hundreds of sequences get a token in one step, with the same gap since their last one; observing
each alone would cost more than planning the step. Written by one thread; a scrape from another
may see the newest observation half counted, never a lost one.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class WeightedHistogram(Collector):
    """One series of one histogram with fixed labels."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        documentation: str,
        *,
        labels: Mapping[str, str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        """``buckets`` are upper bounds, growing; the infinite one is added."""
        self.name = name
        self.documentation = documentation
        self.labels = dict(labels)
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """Add ``count`` observations of ``value``."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Yield the series to the registry."""
        total = 0
        buckets = []
        for bound, count in zip((*self._bounds, float("inf")), tuple(self._counts), strict=True):
            total += count
            buckets.append((_bound_text(bound), total))
        family = HistogramMetricFamily(self.name, self.documentation, labels=tuple(self.labels))
        family.add_metric(tuple(self.labels.values()), buckets, self._sum)
        yield family


def _bound_text(bound: float) -> str:
    """Return a bucket's label in the client library's spelling."""
    return "+Inf" if bound == float("inf") else repr(float(bound))
