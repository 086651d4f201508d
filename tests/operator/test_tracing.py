"""Tracing of a service: what its processes are told, what they may reach, what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.operator.test_children import facts

from tandem.operator.desired.capability import unsupported
from tandem.operator.desired.compose import base
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.router import router_arguments, router_template
from tandem.operator.desired.worker import worker_arguments, worker_template

FLAGS = "--otlp-traces"


def told(arguments: list[str]) -> dict[str, str]:
    return {flag: value for flag, value in pairwise(arguments) if flag.startswith(FLAGS)}


def variables(template: Manifest) -> dict[str, str]:
    env = template["spec"]["containers"][0]["env"]
    return {each["name"]: each["value"] for each in env if each["name"].startswith("OTEL_")}


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
    assert told(router_arguments(given)) == {"--otlp-traces-endpoint": endpoint}
    children = base(given)
    protocols = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol}
    for role in (Role.PREFILL, Role.DECODE):
        assert told(worker_arguments(given, role)) == {"--otlp-traces-endpoint": endpoint}
        assert variables(worker_template(given, role)) == protocols
    assert variables(router_template(given)) == protocols | {"OTEL_TRACES_SAMPLER_ARG": "0.05"}
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
