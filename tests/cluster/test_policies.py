"""What the enforcer lets pass, as nftables text; the cluster's own tests send real packets."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cluster.policies import View, matches, table

NAMESPACES = tuple(
    {"metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name}}}
    for name in ("models", "monitoring")
)


def pod(name: str, address: str, namespace: str = "models", **labels: str) -> dict[str, Any]:
    """A running pod of node1 with a port named ``probe``."""
    container = {"name": "main", "ports": [{"name": "probe", "containerPort": 8001}]}
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"nodeName": "node1", "containers": [container]},
        "status": {"podIP": address, "phase": "Running"},
    }


def policy(selector: dict[str, Any], **ways: list[dict[str, Any]]) -> dict[str, Any]:
    """A policy of the namespace ``models``."""
    types = [way.capitalize() for way in ways]
    spec = {"podSelector": selector, "policyTypes": types, **ways}
    return {"metadata": {"namespace": "models"}, "spec": spec}


WORKER, ROUTER = pod("worker", "10.0.0.1", role="decode"), pod("router", "10.0.0.2", role="router")
SCRAPER = pod("scraper", "10.0.0.3", "monitoring")
SELECTED = {"matchLabels": {"role": "decode"}}


def rules(*ingress: dict[str, Any], way: str = "ingress") -> str:
    """Node1's table when one policy isolates the worker."""
    chosen = policy(SELECTED, **{way: list(ingress)})
    return table("node1", View((WORKER, ROUTER, SCRAPER), NAMESPACES, (chosen,)))


def test_a_selected_pod_is_isolated_and_no_other() -> None:
    """A policy without rules drops all that comes to its pods, and touches no other pod."""
    text = rules()
    assert "chain ingress-10-0-0-1 {\ndrop\n}" in text
    assert text.count("jump") == 1
    assert "ip daddr 10.0.0.1 jump ingress-10-0-0-1" in text


def test_a_peer_may_reach_the_named_port_only() -> None:
    """A rule lets a pod's address to a port that the policy names, resolved in the target."""
    text = rules(
        {
            "from": [{"podSelector": {"matchLabels": {"role": "router"}}}],
            "ports": [{"port": "probe"}],
        }
    )
    assert "ip saddr { 10.0.0.2 } tcp dport 8001 return" in text
    assert "10.0.0.3" not in text


def test_a_rule_whose_peers_are_not_there_lets_nothing_pass() -> None:
    """No pod matches: the rule must not turn into one for everybody."""
    text = rules({"from": [{"podSelector": {"matchLabels": {"role": "nobody"}}}]})
    assert "return" not in text
    assert "chain ingress-10-0-0-1 {\ndrop\n}" in text


def test_an_empty_rule_lets_everything_pass() -> None:
    """`ingress: [{}]` is how a policy allows all."""
    assert "chain ingress-10-0-0-1 {\nreturn\ndrop\n}" in rules({})


def test_namespaces_ranges_and_blocks() -> None:
    """Peers by namespace and by address block with holes, ports by range, in both directions."""
    monitoring = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    text = rules(
        {"from": [{"namespaceSelector": monitoring}], "ports": [{"port": 5590, "endPort": 5605}]}
    )
    assert "ip saddr { 10.0.0.3 } tcp dport 5590-5605 return" in text
    block = {"cidr": "10.1.0.0/24", "except": ["10.1.0.0/25"]}
    text = rules(
        {"to": [{"ipBlock": block}], "ports": [{"port": 53, "protocol": "UDP"}]}, way="egress"
    )
    assert "ip daddr { 10.1.0.128/25 } udp dport 53 return" in text
    assert "ip saddr 10.0.0.1 jump egress-10-0-0-1" in text


@pytest.mark.parametrize(
    ("operator", "values", "taken"),
    [
        ("In", ["a"], True),
        ("NotIn", ["a"], False),
        ("Exists", [], True),
        ("DoesNotExist", [], False),
    ],
)
def test_label_expressions(operator: str, values: list[str], taken: bool) -> None:
    """The four operators of a label selector, on a label with the value ``a``."""
    expression = {"key": "tier", "operator": operator, "values": values}
    assert matches({"matchExpressions": [expression]}, {"tier": "a"}) is taken
