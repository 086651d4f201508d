"""NetworkPolicies as nftables rules: a pure function from a cluster's objects to a node's table.

Covers podSelector, namespaceSelector, ipBlock with except, ports by number, range and name, both
directions. A pod's chain lets a packet pass by `return`, so that the other direction is looked at
as well, and drops what no rule lets pass. The caller is the enforcer.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]

TABLE = "netpol"


@dataclass(frozen=True)
class View:
    """What the rules depend on, as the API server gives it."""

    pods: tuple[Json, ...]
    namespaces: tuple[Json, ...]
    policies: tuple[Json, ...]

    @property
    def networked(self) -> tuple[Json, ...]:
        """Pods that live and have an address of their own."""
        return tuple(
            pod
            for pod in self.pods
            if pod.get("status", {}).get("podIP")
            and not pod["spec"].get("hostNetwork")
            and pod["status"]["phase"] in ("Pending", "Running")
        )


def matches(selector: Json, labels: Json) -> bool:
    wanted = selector.get("matchLabels", {})
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_holds(each, labels) for each in selector.get("matchExpressions", []))


def _holds(expression: Json, labels: Json) -> bool:
    key, values = expression["key"], expression.get("values", [])
    if expression["operator"] in ("Exists", "DoesNotExist"):
        return (key in labels) is (expression["operator"] == "Exists")
    return (labels.get(key) in values) is (expression["operator"] == "In")


def table(node: str, view: View) -> str:
    """The nft script that replaces a node's whole table in one transaction."""
    chains, jumps = [], []
    for pod in view.networked:
        if pod["spec"].get("nodeName") != node:
            continue
        address = pod["status"]["podIP"]
        for way, side in (("Ingress", "daddr"), ("Egress", "saddr")):
            chosen = [policy for policy in view.policies if _applies(policy, way, pod)]
            if chosen:
                name = f"{way.lower()}-{address}".replace(".", "-")
                rules = [rule for policy in chosen for rule in _rules(way, policy, pod, view)]
                chains.append("\n".join([f"chain {name} {{", *rules, "drop", "}"]))
                jumps.append(f"ip {side} {address} jump {name}")
    hook = "type filter hook forward priority 10;\nct state established,related accept"
    forward = "\n".join(["chain forward {", hook, *jumps, "}"])
    body = "\n".join([*chains, forward])
    return f"table ip {TABLE}\ndelete table ip {TABLE}\ntable ip {TABLE} {{\n{body}\n}}\n"


def _applies(policy: Json, way: str, pod: Json) -> bool:
    spec, meta = policy["spec"], pod["metadata"]
    return (
        policy["metadata"]["namespace"] == meta["namespace"]
        and way in spec["policyTypes"]
        and matches(spec.get("podSelector", {}), meta.get("labels", {}))
    )


def _rules(way: str, policy: Json, pod: Json, view: View) -> Iterator[str]:
    """Conditions under which a policy lets packets of one direction pass."""
    side, peers = ("saddr", "from") if way == "Ingress" else ("daddr", "to")
    namespace = policy["metadata"]["namespace"]
    for rule in policy["spec"].get(way.lower()) or []:
        who = ""
        if rule.get(peers):
            found = {each for peer in rule[peers] for each in _addresses(peer, namespace, view)}
            if not found:
                continue
            who = f"ip {side} {{ {', '.join(sorted(found))} }} "
        for port in rule.get("ports") or [{}]:
            yield f"{who}{_port(port, pod)}return"


def _port(port: Json, pod: Json) -> str:
    if not port:
        return ""
    protocol = port.get("protocol", "TCP").lower()
    number = port.get("port")
    if number is None:
        return f"meta l4proto {protocol} "
    if isinstance(number, str):
        number = _named(number, pod)
    last = f"-{port['endPort']}" if "endPort" in port else ""
    return f"{protocol} dport {number}{last} "


def _named(name: str, pod: Json) -> int:
    """A named port of a pod; 0, which nothing listens on, where the pod has none of that name."""
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", []):
            if port.get("name") == name:
                return int(port["containerPort"])
    return 0


def _addresses(peer: Json, own: str, view: View) -> list[str]:
    if block := peer.get("ipBlock"):
        return [str(network) for network in _networks(block)]
    spaces = {own}
    if "namespaceSelector" in peer:
        selector = peer["namespaceSelector"]
        spaces = {
            each["metadata"]["name"]
            for each in view.namespaces
            if matches(selector, each["metadata"].get("labels", {}))
        }
    return [
        pod["status"]["podIP"]
        for pod in view.networked
        if pod["metadata"]["namespace"] in spaces
        and matches(peer.get("podSelector", {}), pod["metadata"].get("labels", {}))
    ]


def _networks(block: Json) -> list[ipaddress.IPv4Network]:
    networks = [ipaddress.IPv4Network(block["cidr"])]
    for hole in map(ipaddress.IPv4Network, block.get("except", [])):
        cut = [
            list(network.address_exclude(hole)) if hole.subnet_of(network) else [network]
            for network in networks
        ]
        networks = [part for parts in cut for part in parts]
    return networks
