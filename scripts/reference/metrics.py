"""docs/reference/metrics.md: every series of every process, from the registries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from scripts.reference.table import MADE, code, table

from tandem.engine.cache.block_pool import BlockEventLog
from tandem.engine.config import CacheConfig
from tandem.engine.metrics import EngineMetrics
from tandem.engine.offload.connector import OffloadConnector
from tandem.kvtransfer.metrics import metrics_of
from tandem.operator.metrics import OperatorMetrics
from tandem.router.gauges import register_gauges
from tandem.router.metrics import RouterMetrics
from tandem.worker.link_metrics import LinkMetrics

_HEAD = f"""# Metrics

{MADE}
Each process serves `/metrics` for Prometheus: the router on its own port, workers on
`--probe-port`, the operator on its `--port`. Names are vLLM's where the meaning is the same, else
begin with `tandem`. Counters are scraped with `_total` at the end of their names, histograms as
`_bucket`, `_sum` and `_count`.
"""
_KINDS = {"counter": "counter", "gauge": "gauge", "histogram": "histogram", "info": "info"}


def registries() -> dict[str, CollectorRegistry]:
    """By heading; nothing is read of what they will count."""
    router = RouterMetrics()
    register_gauges(router, cast(Any, None), cast(Any, None))
    worker = CollectorRegistry()
    engine = EngineMetrics(worker, model_name="", max_model_len=1)
    engine.set_cache_info(CacheConfig(), 1, 16)
    engine.show_offload(_tier())
    LinkMetrics(worker)
    metrics_of(worker)
    return {"Router": router.registry, "Workers": worker, "Operator": OperatorMetrics().registry}


def _tier() -> OffloadConnector:
    log = BlockEventLog()
    return OffloadConnector(1, block_size=16, block_bytes=1, log=log, cached_here=lambda _: False)


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for title, registry in registries().items():
        parts.append(f"## {title}\n")
        parts.append(table(("name", "type", "labels", ""), sorted(_rows(registry))))
    return "\n".join(parts)


def _rows(registry: CollectorRegistry) -> Iterator[tuple[str, str, str, str]]:
    for collector in registry._collector_to_names:  # the only list of what a registry holds
        each = cast(Any, collector)
        if isinstance(collector, MetricWrapperBase):
            kind, labels = collector._type, collector._labelnames
            yield _row(each._name, str(kind), labels, collector._documentation)
        else:
            yield _row(each.name, each.kind, tuple(each.labels), each.documentation)


def _row(name: str, kind: str, labels: tuple[str, ...], text: str) -> tuple[str, str, str, str]:
    return code(name), _KINDS[kind], ", ".join(map(code, labels)), text
