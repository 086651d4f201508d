"""Where spans go: the port that is dialled is the one that a URL means."""

from __future__ import annotations

import pytest

from tandem.link.spans import with_port
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.tracing import TracingConfig


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
def test_a_path_is_for_http_alone(endpoint: str) -> None:
    """gRPC would drop it without a word."""
    with pytest.raises(InvalidParameter, match=r"otlp_traces_endpoint.*no path"):
        TracingConfig(otlp_traces_endpoint=endpoint)
    TracingConfig(otlp_traces_endpoint=endpoint, otlp_traces_protocol="http/protobuf")
    TracingConfig(otlp_traces_endpoint="http://collector:4317/")
