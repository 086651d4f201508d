"""Metrics of the offload tier: read at a scrape, so that no step observes anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.engine.offload.connector import OffloadConnector

_Reading = Callable[[], Mapping[tuple[str, ...], float]]
"""Values by those of the labels that the series adds."""


def register(registry: CollectorRegistry, tier: OffloadConnector, own: Mapping[str, str]) -> None:
    """Register the metrics of ``tier`` on ``registry``, under vLLM's names if the meaning is the
    same, else ``tandem:``; ``own`` are labels of each series."""
    stats = tier.stats

    def moved() -> Mapping[tuple[str, ...], float]:
        blocks = {("GPU_to_CPU",): stats.num_stored, ("CPU_to_GPU",): stats.num_loaded}
        return {way: count * stats.block_bytes for way, count in blocks.items()}

    def series(name: str, text: str, read: Callable[[], float], *, gauge: bool = False) -> None:
        registry.register(_Series(name, text, own, (), lambda: {(): read()}, gauge=gauge))

    name = "vllm:kv_offload_total_bytes"
    text = "KV bytes copied between the cache and host memory."
    registry.register(_Series(name, text, own, ("transfer_type",), moved))
    series(
        "vllm:kv_offload_cpu_cache_usage_perc",
        "Share of host memory's KV blocks that can be found, 0 to 1.",
        lambda: tier.num_cached / tier.num_blocks,
        gauge=True,
    )
    series(
        "vllm:kv_offload_stores_skipped",
        "Blocks that were lost as all host blocks were being read.",
        lambda: stats.num_declined,
    )
    series(
        "tandem:kv_offload_hit_tokens",
        "Tokens whose KV came back from host memory instead of being computed.",
        lambda: stats.hit_tokens,
    )
    series(
        "tandem:kv_offload_evicted_blocks",
        "Blocks of host memory that made room for others.",
        lambda: stats.num_evicted,
    )
    series(
        "tandem:kv_offload_failed_loads",
        "Loads from host memory that failed; their requests were computed.",
        lambda: stats.num_failed_loads,
    )


class _Series(Collector):
    """One family that is read at a scrape."""

    def __init__(
        self,
        name: str,
        documentation: str,
        own: Mapping[str, str],
        labels: tuple[str, ...],
        read: _Reading,
        *,
        gauge: bool = False,
    ) -> None:
        self.name, self.documentation = name, documentation
        self.labels = (*own, *labels)
        self.kind = "gauge" if gauge else "counter"
        self._own = tuple(own.values())
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        make = GaugeMetricFamily if self.kind == "gauge" else CounterMetricFamily
        family = make(self.name, self.documentation, labels=self.labels)
        for values, number in self._read().items():
            family.add_metric((*self._own, *values), number)
        yield family
