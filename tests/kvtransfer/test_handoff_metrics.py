"""Series of the hand-off that are there before anything went wrong."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from tests.kvtransfer.builders import Consumer, Producer, make_config, make_key

from tandem.kvtransfer import events
from tandem.kvtransfer.metrics import metrics_of
from tandem.kvtransfer.mover import prober
from tandem.protocol.errors import FailCause


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_failures_begin_at_nothing(role: str) -> None:
    """Of a series that begins at 1 Prometheus sees no increase: the first failure would be lost."""
    registry = CollectorRegistry()
    metrics_of(registry).start(role)

    for cause in FailCause:
        labels = {"role": role, "cause": str(cause)}
        assert registry.get_sample_value("tandem:kv_handoff_failures_total", labels) == 0
    assert registry.get_sample_value("tandem:kv_links_lost_total", {"role": role}) == 0
    stray = {"what": f"{'p' if role == 'producer' else 'd'}:message of an old link"}
    assert registry.get_sample_value("tandem:kv_stray_events_total", stray) == 0


def test_a_lease_that_lapses_is_counted_though_nobody_says_anything(workers, monkeypatch) -> None:
    """Its consumer never asked for it, and no other hand-off comes."""
    monkeypatch.setattr(prober, "AGAIN_MS", ())
    producer, consumer = workers(Producer, make_config(kv_lease_seconds=0.3)), workers(Consumer)
    consumer.meet(producer)
    counted = noted(producer, monkeypatch)
    producer.hand_over(make_key("a"), 8, [0, 1], consumer.incarnation)
    producer.wait_for(events.Released, make_key("a"))
    producer.until(lambda: producer.metric("tandem:kv_leases") == 0)
    assert 1 in counted


def noted(producer: Producer, monkeypatch) -> list[float]:
    """What the gauge of leases says whenever it is set: a test that looks may look too late."""
    gauge, said = producer.service._mover.metrics.leases, list[float]()
    put = gauge.set

    def put_and_note(count: float) -> None:
        put(count)
        said.append(producer.metric("tandem:kv_leases"))

    monkeypatch.setattr(gauge, "set", put_and_note)
    return said
