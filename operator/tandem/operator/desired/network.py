"""NetworkPolicies: workers talk to routers and workers of their own service, and to nobody else.

Everything is denied that is not listed, both ways. Pure; called by ``compose``.
"""

from __future__ import annotations

from tandem.operator.desired.facts import Facts
from tandem.operator.desired.fetching import fetch_ports
from tandem.operator.desired.model import delivery
from tandem.operator.desired.naming import MODEL_COMPONENT, WORKERS, Manifest, Role
from tandem.operator.desired.policy import answering_role, has_network_policies, probe_port
from tandem.operator.desired.tracing import tracing_port
from tandem.protocol import names

_NAMESPACE_LABEL = "kubernetes.io/metadata.name"
_API_SERVER_PORTS = (443, 6443)
"""The API server's address is not known here, and no policy can name it."""


def network_policies(facts: Facts) -> list[Manifest]:
    """A policy per component; none where the spec disables them."""
    if not has_network_policies(facts.spec):
        return []
    policies = [_policy(facts, role, _worker(facts, role)) for role in WORKERS]
    policies.append(_policy(facts, Role.ROUTER, _router(facts)))
    policies.append(_policy(facts, MODEL_COMPONENT, {"ingress": [], "egress": _fetching(facts)}))
    return policies


def _policy(facts: Facts, component: str, rules: Manifest) -> Manifest:
    owner = facts.owner
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": owner.metadata(owner.child(component), component),
        "spec": {
            "podSelector": {"matchLabels": owner.selector(component)},
            "policyTypes": ["Ingress", "Egress"],
            **rules,
        },
    }


def _worker(facts: Facts, role: Role) -> Manifest:
    workers = [_peer(facts, each) for each in WORKERS]
    last = names.DATA_PORT + names.DATA_PORTS - 1
    data = {"protocol": "TCP", "port": names.DATA_PORT, "endPort": last}
    ingress: list[Manifest] = [
        {"from": [_peer(facts, Role.ROUTER)], "ports": [_tcp(names.WORKER_PORT)]},
        {"from": workers, "ports": [_tcp(names.CONTROL_PORT), data]},
        {"from": _scrapers(facts), "ports": [_tcp(probe_port(facts.spec, role))]},
    ]
    egress: list[Manifest] = [
        _dns(),
        {"to": workers, "ports": [_tcp(names.CONTROL_PORT), data]},
    ]
    return {"ingress": ingress, "egress": [*egress, *_own_fetch(facts, role), *_spans(facts)]}


def _router(facts: Facts) -> Manifest:
    workers = [_peer(facts, each) for each in WORKERS]
    egress: list[Manifest] = [
        _dns(),
        {"to": workers, "ports": [_tcp(names.WORKER_PORT)]},
        {"ports": [_tcp(port) for port in _API_SERVER_PORTS]},
    ]
    egress += [*_own_fetch(facts, Role.ROUTER), *_spans(facts)]
    ports = [names.ROUTER_PORT]
    if facts.spec.router.service.grpc_port:
        ports.append(names.GRPC_PORT)
    return {"ingress": [{"ports": [_tcp(port) for port in ports]}], "egress": egress}


def _spans(facts: Facts) -> list[Manifest]:
    """The way to whoever takes spans, whose address is not known here."""
    port = tracing_port(facts.spec)
    return [] if port is None else [{"ports": [_tcp(port)]}]


def _fetching(facts: Facts) -> list[Manifest]:
    if delivery(facts.spec).source is None:
        return []
    return [_dns(), _web(facts, answering_role(facts.spec))]


def _own_fetch(facts: Facts, role: Role) -> list[Manifest]:
    """The way of pods that fetch the model for themselves."""
    return [_web(facts, role)] if delivery(facts.spec).in_pods else []


def _web(facts: Facts, role: Role) -> Manifest:
    return {"ports": [_tcp(port) for port in fetch_ports(facts.spec, role)]}


def _peer(facts: Facts, component: str) -> Manifest:
    return {"podSelector": {"matchLabels": facts.owner.selector(component)}}


def _scrapers(facts: Facts) -> list[Manifest]:
    settings = facts.settings
    spaces = {settings.metrics_namespace, settings.own_namespace} - {""}
    peers: list[Manifest] = [
        {"namespaceSelector": {"matchLabels": {_NAMESPACE_LABEL: space}}}
        for space in sorted(spaces)
    ]
    return [*peers, _peer(facts, Role.ROUTER)]


def _tcp(port: int) -> Manifest:
    return {"protocol": "TCP", "port": port}


def _dns() -> Manifest:
    return {"ports": [{"protocol": "UDP", "port": 53}, _tcp(53)]}
