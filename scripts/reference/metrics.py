"""docs/reference/metrics.md: every series of every process, from the registries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from scripts.dashboards import boards
from scripts.reference.table import MADE, code, table
from scripts.rules import uses

from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.config import CacheConfig
from tandem.engine.metrics import EngineMetrics
from tandem.engine.offload.connector import OffloadConnector
from tandem.engine.offload.lru import LRUBlocks
from tandem.kvtransfer.metrics import metrics_of
from tandem.kvtransfer.nodeagent.run import AgentSeries
from tandem.operator.cluster.store import Store
from tandem.operator.metrics import OperatorMetrics
from tandem.operator.service_gauges import ServiceGauges
from tandem.router.metrics import RouterMetrics
from tandem.router.observe.fleet_view import register_link_series
from tandem.router.observe.gauges import register_gauges
from tandem.worker.connectors.prefix_fetch import PullMetrics
from tandem.worker.io import LinkMetrics
from tandem.worker.launch import show_rank_processes

_HEAD = f"""# Metrics

{MADE}
Each process serves `/metrics` for Prometheus: the router on its own port, workers and node agents
on `--probe-port`, the operator on its `--port`. A name is vLLM's if the meaning is the same; other
names begin with `tandem`. Counters have the suffix `_total`, histograms `_bucket`, `_sum` and
`_count`. Alerts and panels are those of [the chart](../observability.md).
"""
_KINDS = {"counter": "counter", "gauge": "gauge", "histogram": "histogram", "info": "info"}


class Series(NamedTuple):
    """One family of a registry."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def registries() -> dict[str, CollectorRegistry]:
    """Return the registries by heading, without values."""
    router = RouterMetrics()
    register_gauges(router, *cast(Any, (None, None, None)), ready_decode=1)
    register_link_series(router, cast(Any, None))
    worker = CollectorRegistry()
    engine = EngineMetrics(worker, model_name="", max_model_len=1)
    engine.set_cache_info(CacheConfig(), 1, 16)
    engine.set_device("NVIDIA H200")  # any that is known
    engine.show_offload(_tier())
    LinkMetrics(worker)
    show_rank_processes(worker, dict)
    metrics_of(worker)
    PullMetrics(worker)
    agent = CollectorRegistry()
    agent.register(AgentSeries(dict))
    operator = OperatorMetrics().registry
    operator.register(ServiceGauges(Store()))
    return {
        "Router": router.registry,
        "Workers": worker,
        "Node agent": agent,
        "Operator": operator,
    }


def _tier() -> OffloadConnector:
    return OffloadConnector(LRUBlocks(1), manager=KVCacheManager(1, 16), block_bytes=1)


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    users = uses.of_alerts(), uses.of(boards.queries())
    for title, registry in registries().items():
        rows = sorted(_rows(registry, *users))
        parts += [
            f"## {title}\n",
            table(("name", "type", "labels", "alerts", "panels", "meaning"), rows),
        ]
    return "\n".join(parts)


def series(registry: CollectorRegistry) -> Iterator[Series]:
    """Return the series of a registry, in no order."""
    for collector in registry._collector_to_names:  # the only list of it
        each = cast(Any, collector)
        if isinstance(collector, MetricWrapperBase):
            kind, labels = collector._type, collector._labelnames
            yield Series(each._name, str(kind), tuple(labels), collector._documentation)
        elif isinstance(collector, ServiceGauges | AgentSeries):
            for family in collector.describe():
                names = tuple(cast(Any, family)._labelnames)
                yield Series(family.name, family.type, names, family.documentation)
        else:
            yield Series(each.name, each.kind, tuple(each.labels), each.documentation)


def _rows(
    registry: CollectorRegistry, alerts: uses.Uses, panels: uses.Uses
) -> Iterator[tuple[str, ...]]:
    for each in series(registry):
        labels = ", ".join(map(code, each.labels))
        runbooks = (
            f"[{name}](../runbooks/{name}.md)" for name in sorted(alerts.get(each.name, ()))
        )
        shown = "; ".join(sorted(panels.get(each.name, ())))
        yield code(each.name), _KINDS[each.kind], labels, ", ".join(runbooks), shown, each.text
