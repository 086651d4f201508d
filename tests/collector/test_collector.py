"""What makes a trace whole, how it is drawn, and that a real collector writes what is read here."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as ByGrpc
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as ByHttp
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Status, StatusCode
from tests.collector import traces
from tests.collector.collector import PROGRAM, Collector
from tests.waiting import wait_for


def span(name: str, parent: str, begin: float, end: float, error: str = "") -> traces.Span:
    """A span whose id is its name."""
    service = "tandem-router"
    return traces.Span("t", name, parent, name, service, begin, end, error, ((begin, "seen"),), {})


PARENTS = {"call": (), "attempt": ("call",), "chunk": ("attempt",)}
WHOLE = [span("call", "", 1, 5), span("attempt", "call", 2, 4), span("chunk", "attempt", 2.5, 3)]


def test_a_whole_trace_has_no_faults() -> None:
    assert traces.faults(WHOLE, {name: PARENTS[name] for name in ("attempt", "chunk")}) == []
    assert [each.name for each in traces.of(WHOLE[::-1], "t")] == ["call", "attempt", "chunk"]
    assert [depth for _, depth in traces.tree(WHOLE)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("spans", "fault"),
    [
        (WHOLE[:2], "no span chunk"),
        ([WHOLE[0], WHOLE[2]], "roots: call, chunk"),
        ([*WHOLE[:2], span("chunk", "call", 2, 3)], "chunk stands under call"),
        ([*WHOLE[:2], span("chunk", "attempt", 1, 3)], "chunk begins before attempt"),
        ([*WHOLE[:2], span("chunk", "attempt", 3, 2.5)], "chunk ends before it begins"),
    ],
)
def test_what_is_wrong_is_named(spans: list[traces.Span], fault: str) -> None:
    """A missing span, a lost parent, a wrong one, and times that cannot be."""
    assert fault in traces.faults(spans, {"attempt": ("call",), "chunk": ("attempt",)})


@pytest.mark.skipif(not PROGRAM.is_file(), reason="make traces builds a collector")
def test_a_collector_writes_what_is_read(tmp_path: Path) -> None:
    """By both ways in: names, parents, errors, events, and whose they are."""
    with Collector.running(tmp_path) as collector:
        exporters = {
            "grpc": ByGrpc(endpoint=collector.grpc_url, insecure=True),
            "http": ByHttp(endpoint=f"{collector.http_url}/v1/traces"),
        }
        for name, exporter in exporters.items():
            provider = TracerProvider(resource=Resource.create({"service.name": name}))
            provider.add_span_processor(SimpleSpanProcessor(exporter))
            tracer = provider.get_tracer("test")
            with tracer.start_as_current_span("outer"), tracer.start_as_current_span("inner") as it:
                it.add_event("seen")
                it.set_status(Status(StatusCode.ERROR, "broke"))
            provider.shutdown()
        wait_for(lambda: len(traces.read(collector.file)) == 4, 20)
        found = traces.read(collector.file)
    for name in exporters:
        inner, outer = sorted((each for each in found if each.service == name), key=_name)
        assert (inner.parent, outer.parent) == (outer.id, "")
        assert (inner.error, outer.error) == ("broke", "")
        assert [event for _, event in inner.events] == ["seen"]


def _name(each: traces.Span) -> str:
    return each.name
