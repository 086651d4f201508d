"""Series of a worker's links to routers that are there before anything went wrong."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from tandem.worker.io import DROPS, LinkMetrics


def test_drops_begin_at_nothing() -> None:
    """Of a series that begins at 1 Prometheus sees no increase: the first would be lost."""
    registry = CollectorRegistry()
    metrics = LinkMetrics(registry)
    name = "tandem:link_frames_dropped_total"
    assert [registry.get_sample_value(name, {"reason": each}) for each in DROPS] == [0, 0, 0]
    metrics.dropped("garbage")
    assert registry.get_sample_value(name, {"reason": "garbage"}) == 1
