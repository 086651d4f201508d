"""Where spans go: to the port that a URL means, and nowhere for longer than an end may wait."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tandem.protocol.errors import InvalidParameter
from tandem.tracing import spans as link_spans
from tandem.tracing.config import TracingConfig, sampled_share
from tandem.tracing.spans import with_port


@pytest.mark.parametrize(
    ("endpoint", "dialled"),
    [
        ("http://collector", "http://collector:80"),
        ("https://collector/", "https://collector:443"),
        ("http://collector:4317", "http://collector:4317"),
        ("http://[fd00::1]", "http://[fd00::1]:80"),
        ("http://[fd00::1]:4317", "http://[fd00::1]:4317"),
    ],
)
def test_a_url_without_a_port_means_its_schemes(endpoint: str, dialled: str) -> None:
    """Left to itself gRPC dials 443 for http, too, which no network policy opens for it."""
    assert with_port(endpoint) == dialled


@pytest.mark.parametrize("endpoint", ["http://collector/v1/traces", "https://collector:4317/x"])
def test_a_path_is_for_http_alone(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC would drop it without a word."""
    with pytest.raises(InvalidParameter, match=r"otlp_traces_endpoint.*no path"):
        TracingConfig(otlp_traces_endpoint=endpoint)
    TracingConfig(otlp_traces_endpoint="http://collector:4317/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    TracingConfig(otlp_traces_endpoint=endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(InvalidParameter, match=r"otlp_traces_endpoint.*no path"):
        TracingConfig(otlp_traces_endpoint=endpoint)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "one of grpc, http/protobuf"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "udp", "one of grpc, http/protobuf"),
        ("OTEL_TRACES_SAMPLER_ARG", "1.5", "a number from 0 to 1"),
        ("OTEL_TRACES_SAMPLER_ARG", "half", "a number from 0 to 1"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote", "parentbased_always_off"),
    ],
)
def test_a_bad_variable_is_refused_at_start_if_there_is_an_endpoint(
    name: str, value: str, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    TracingConfig()
    with pytest.raises(InvalidParameter, match=f"{name}.*{allowed}"):
        TracingConfig(otlp_traces_endpoint="http://collector:4317")


@pytest.mark.parametrize(
    ("environ", "share"),
    [
        ({}, 1.0),
        ({"OTEL_TRACES_SAMPLER_ARG": "0.25"}, 0.25),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}, 1.0),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, 0.0),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_on", "OTEL_TRACES_SAMPLER_ARG": "0.1"}, 1.0),
    ],
)
def test_the_sampled_share_follows_opentelemetrys_variables(
    environ: dict[str, str], share: float
) -> None:
    assert sampled_share(environ) == share


class Stuck(SpanExporter):
    """Sends to a collector that takes nothing until it is let."""

    def __init__(self) -> None:
        self.let = Event()
        self.asked = Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.let.wait(60)
        return SpanExportResult.SUCCESS


def test_an_end_waits_for_no_dead_collector(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process would be killed meanwhile, with more to let go of; what is lost is said."""
    exporter = Stuck()
    monkeypatch.setattr(link_spans, "_exporter", lambda config: exporter)
    monkeypatch.setattr(link_spans, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(link_spans, "MAX_WAITING", 1)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    config = TracingConfig(otlp_traces_endpoint="http://collector:4317")
    spans = link_spans.Spans(config, "tandem-router", "me", begins_traces=True)
    made = Event()

    def slowly() -> None:
        spans.begin("call", 0.0, "").end(1.0)
        made.wait(60)

    while not spans.dropped:
        spans.later(slowly)
    made.set()
    assert exporter.asked.wait(60)
    spans.close()
    spans.close()
    exporter.let.set()
    assert "spans of 1 calls were dropped" in caplog.text
    assert "spans that could not be sent within 0.1 s are lost" in caplog.text
