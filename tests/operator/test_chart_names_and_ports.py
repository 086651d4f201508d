"""Ports that policies open, by the chart and by the operator alike, and names that are digits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.manifests import load_manifests
from tests.operator.test_children import facts
from tests.operator.test_install import AGENT, CHART, NEEDS_HELM, helm

from tandem.cli.settings.command import parse
from tandem.cli.settings.flags import Section
from tandem.cli.settings.logs import LogConfig
from tandem.operator.desired.network import network_policies
from tandem.operator.settings import OperatorSettings
from tandem.protocol.errors import InvalidParameter

SETS = "networkPolicy.apiServerPorts={443,16443},networkPolicy.dnsPorts={5353}"


def settings_of(words: list[str]) -> OperatorSettings:
    sections = [Section("Operator", OperatorSettings), Section("Logging", LogConfig)]
    return OperatorSettings(**parse("operator", "", sections, words)[OperatorSettings])


def installed(*arguments: str) -> tuple[list[Any], OperatorSettings]:
    """What the chart's policy of the operator lets out, rule by rule, and its settings."""
    objects = load_manifests(helm("template", "tandem", CHART, *arguments))
    (policy,) = (each for each in objects if each["kind"] == "NetworkPolicy")
    (deployment,) = (each for each in objects if each["kind"] == "Deployment")
    _, *words = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    return policy["spec"]["egress"], settings_of(words)


def tcp(*ports: int) -> dict[str, Any]:
    """A rule that opens these to everywhere."""
    return {"ports": [{"protocol": "TCP", "port": port} for port in ports]}


def dns(port: int) -> dict[str, Any]:
    return {"ports": [{"protocol": each, "port": port} for each in ("UDP", "TCP")]}


@NEEDS_HELM
def test_ports_are_opened_to_the_operator_and_told_to_it():
    """So that its own policy and those that it makes let through the same; also where values are
    those of a release that knew none (`--reuse-values`), as a rule without ports opens all."""
    usual = OperatorSettings()
    for none in ((), ("--set", "networkPolicy.apiServerPorts=null,networkPolicy.dnsPorts=null")):
        egress, settings = installed(*none)
        assert egress[:2] == [dns(53), tcp(443, 6443)]
        assert (settings.api_server_ports, settings.dns_ports) == ((443, 6443), (53,))
        assert (usual.api_server_ports, usual.dns_ports) == ((443, 6443), (53,))
    egress, settings = installed("--set", SETS)
    assert egress[:2] == [dns(5353), tcp(443, 16443)]
    assert (settings.api_server_ports, settings.dns_ports) == ((443, 16443), (5353,))


def test_policies_of_a_service_open_the_ports_that_the_operator_is_told():
    """DNS to all components that ask for names, the API server to routers alone."""
    given = settings_of(
        ["--api-server-ports=443", "--api-server-ports", "16443", "--dns-ports=5353"]
    )
    made = network_policies(msgspec.structs.replace(facts(), settings=given))
    egress = {each["metadata"]["name"]: each["spec"]["egress"] for each in made}
    for name in ("demo-router", "demo-prefill", "demo-decode"):
        assert egress[name][0] == dns(5353)
        assert (tcp(443, 16443) in egress[name]) is (name == "demo-router")
    opened = {port["port"] for rules in egress.values() for rule in rules for port in rule["ports"]}
    assert not opened & {53, 6443}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--api-server-ports=https"], "--api-server-ports: 'https' is not allowed; an integer"),
        (["--api-server-ports=0"], "api_server_ports: 0 is not allowed; an integer, 1 to 65535"),
        (["--dns-ports=53", "--dns-ports=65536"], "dns_ports: 65536 is not allowed"),
        (["--dns-ports="], "--dns-ports"),
    ],
)
def test_what_is_no_port_is_refused(words: list[str], said: str):
    with pytest.raises(InvalidParameter, match=said):
        settings_of(words)


def test_no_ports_at_all_are_refused():
    """A rule without ports would open all of them."""
    with pytest.raises(InvalidParameter, match=r"api_server_ports.*one port or more"):
        OperatorSettings(api_server_ports=())
    with pytest.raises(InvalidParameter, match=r"dns_ports.*one port or more"):
        OperatorSettings(dns_ports=())


@NEEDS_HELM
@pytest.mark.parametrize("name", ["apiServerPorts", "dnsPorts"])
@pytest.mark.parametrize(("ports", "said"), [("{0}", "/0': minimum"), ("{443,443}", "equal")])
def test_the_chart_takes_ports_alone(name: str, ports: str, said: str):
    """The schema names a wrong value before anything is installed."""
    text = helm("template", "tandem", CHART, "--set", f"networkPolicy.{name}={ports}")
    assert f"/networkPolicy/{name}" in text
    assert said in text


@NEEDS_HELM
def test_names_of_digits_are_texts():
    """A namespace, release, account or class may be called 12 or 1e3, which is no number in what
    the API server is sent."""
    texts = "watchNamespaces={12,1e3},metrics.namespace=34,serviceAccount.name=56"
    texts += ",priorityClassName=1e2,nodeAgent.runtimeClassName=7,nodeAgent.priorityClassName=0x8"
    texts += ",nodeAgent.claims[0].namespace=90,nodeAgent.claims[0].name=91"
    monitors = "metrics.serviceMonitor.enabled=true,metrics.podMonitor.enabled=true"
    monitors += ",metrics.prometheusRule.enabled=true,metrics.dashboards.enabled=true"
    objects = load_manifests(
        helm(
            *("template", "78", CHART, "-n", "90", "--set-string", texts),
            *("--set", f"crds.install=false,{AGENT},{monitors}"),
        )
    )
    kinds = {each["kind"] for each in objects}
    assert {"Role", "DaemonSet", "Pod", "Lease", "PodMonitor", "PrometheusRule"} <= kinds
    places = {each["metadata"]["namespace"] for each in objects if each["kind"] == "RoleBinding"}
    assert places == {"12", "1e3", "90"}
    wrong = [pair for each in objects for pair in numbers(each)]
    assert not wrong


NAMES = {"name", "namespace", "serviceAccountName", "priorityClassName", "runtimeClassName"}
MAPS = {"labels", "annotations", "matchLabels"}


def numbers(found: Any, inside: str = "") -> Iterator[tuple[str, Any]]:
    """Fields that are names or of a map of texts, and hold something else."""
    if isinstance(found, list):
        for each in found:
            yield from numbers(each, inside)
    elif isinstance(found, dict):
        for key, value in found.items():
            is_text = key in NAMES or inside in MAPS
            if is_text and not isinstance(value, str):
                yield key, value
            yield from numbers(value, key)
