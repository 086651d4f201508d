"""NetworkPolicies: workers connect only to routers and workers of their own service.

A role's policy opens the ports of the spec and of kept revisions.
"""

from __future__ import annotations

from tandem.operator.desired.facts import Facts
from tandem.operator.desired.fetching import fetch_ports, kept_fetch_ports
from tandem.operator.desired.merge import main_of
from tandem.operator.desired.naming import MODEL_COMPONENT, WORKERS, Manifest, Role
from tandem.operator.desired.policy import answering_role, has_network_policies, probe_port
from tandem.operator.desired.tracing import kept_tracing_port, tracing_port
from tandem.operator.desired.worker import kept_probe_port
from tandem.protocol import names

_NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def network_policies(facts: Facts) -> list[Manifest]:
    """Return a policy per component; none if the spec disables them."""
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
        {"from": _scrapers(facts), "ports": [_tcp(each) for each in _probe_ports(facts, role)]},
    ]
    egress: list[Manifest] = [
        _dns(facts),
        {"to": workers, "ports": [_tcp(names.CONTROL_PORT), data]},
    ]
    return {"ingress": ingress, "egress": [*egress, *_own_fetch(facts, role), *_spans(facts, role)]}


def _router(facts: Facts) -> Manifest:
    workers = [_peer(facts, each) for each in WORKERS]
    egress: list[Manifest] = [
        _dns(facts),
        {"to": workers, "ports": [_tcp(names.WORKER_PORT)]},
        # The API server's address is not known here.
        {"ports": [_tcp(port) for port in facts.settings.api_server_ports]},
    ]
    egress += [*_own_fetch(facts, Role.ROUTER), *_spans(facts, Role.ROUTER)]
    ports = [names.ROUTER_PORT]
    if facts.spec.router.service.grpc_port:
        ports.append(names.GRPC_PORT)
    return {"ingress": [{"ports": [_tcp(port) for port in ports]}], "egress": egress}


def _probe_ports(facts: Facts, role: Role) -> list[int]:
    kept = [kept_probe_port(each) for each in facts.kept.get(role, ())]
    return _once(probe_port(facts.spec, role), *kept)


def _spans(facts: Facts, role: Role) -> list[Manifest]:
    """Return the rule that allows the port of the span collector, whose address is unknown."""
    kept = [kept_tracing_port(main_of(each).get("args", ())) for each in facts.kept.get(role, ())]
    return [{"ports": [_tcp(port)]} for port in _once(tracing_port(facts.spec), *kept)]


def _fetching(facts: Facts) -> list[Manifest]:
    if facts.delivery.source is None:
        return []
    ports = fetch_ports(facts.spec, answering_role(facts.spec))
    return [_dns(facts), {"ports": [_tcp(port) for port in ports]}]


def _own_fetch(facts: Facts, role: Role) -> list[Manifest]:
    """Return the rules of pods that fetch the model."""
    now = fetch_ports(facts.spec, role) if facts.delivery.in_pods else []
    kept = [port for each in facts.kept.get(role, ()) for port in kept_fetch_ports(each)]
    ports = _once(*now, *kept)
    return [{"ports": [_tcp(port) for port in ports]}] if ports else []


def _once(*ports: int | None) -> list[int]:
    """Return each port once, in order, without None."""
    return list(dict.fromkeys(port for port in ports if port is not None))


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


def _dns(facts: Facts) -> Manifest:
    ports = facts.settings.dns_ports
    return {
        "ports": [{**_tcp(port), "protocol": each} for port in ports for each in ("UDP", "TCP")]
    }
