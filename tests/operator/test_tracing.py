"""Tracing of a service: what its processes are told, what they may reach, what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.operator.test_children import facts

from tandem.operator.desired.capability import unsupported
from tandem.operator.desired.compose import base
from tandem.operator.desired.router import router_arguments

FLAGS = ("--otlp-traces", "--traces")


def told(arguments: list[str]) -> dict[str, str]:
    return {flag: value for flag, value in pairwise(arguments) if flag.startswith(FLAGS)}


@pytest.mark.parametrize(
    ("endpoint", "protocol", "port"),
    [
        ("http://collector:4317", "grpc", 4317),
        ("http://collector.ns:4318", "http/protobuf", 4318),
        ("https://spans.example/v1/traces", "http/protobuf", 443),
    ],
)
def test_every_process_is_told_and_may_reach_it(endpoint: str, protocol: str, port: int) -> None:
    """Router, prefill and decode; the router alone begins traces. Policies open the port."""
    given = facts(observability__tracing={"endpoint": endpoint, "samplePercent": 5})
    assert unsupported(given.spec) is None
    common = {"--otlp-traces-endpoint": endpoint, "--otlp-traces-protocol": protocol}
    assert told(router_arguments(given)) == {**common, "--traces-sample-ratio": "0.05"}
    children = base(given)
    for name in ("demo-prefill", "demo-decode", "demo-router"):
        (policy,) = (
            child["spec"]
            for child in children
            if child["kind"] == "NetworkPolicy" and child["metadata"]["name"] == name
        )
        assert {"ports": [{"protocol": "TCP", "port": port}]} in policy["egress"]


@pytest.mark.parametrize(
    ("tracing", "field"),
    [
        ({"endpoint": "http://a:99999"}, "endpoint"),
        ({"endpoint": "http://:4317"}, "endpoint"),
        ({"endpoint": "http://a/v1?x=1"}, "endpoint"),
        ({"endpoint": "http://a b"}, "endpoint"),
        ({"samplePercent": 5}, "samplePercent"),
    ],
)
def test_what_no_process_could_use_is_refused(tracing: dict[str, object], field: str) -> None:
    """By name: pods would end at once, or nothing would come of it."""
    said = unsupported(facts(observability__tracing=tracing).spec)
    assert said is not None
    assert said.startswith(f"spec.observability.tracing.{field}:")
