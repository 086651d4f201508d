"""The operator has the rights that it uses, and no others: its requests against its roles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.operator.control_plane import AUDIT_LOG, ControlPlane
from tests.operator.foreign import foreign_objects
from tests.operator.harness import Harness
from tests.operator.node import FakeRouter, Node
from tests.operator.silent import Silent, routers_apart

from tandem.operator.desired.naming import Manifest

pytestmark = pytest.mark.full

Right = tuple[str, str]
"""Resource with its group, and verb."""

ROOT = Path(__file__).parents[2]
EXPLAINED: dict[Right, str] = {
    ("llmservices/finalizers.tandem.dev", "update"): "asked of who sets owner references, where "
    "the admission plugin for them is on",
    ("pods", "get"): "routers may, and nobody may grant what they may not do themselves",
}
"""Rights that no request of the operator shows, and why they are there."""
SOMETIMES: dict[Right, str] = {
    ("leases.coordination.k8s.io", "create"): "the Lease comes with the install",
}
"""Rights for what need not happen in a session of tests."""


def granted() -> set[Right]:
    roles = yaml.safe_load_all((ROOT / "manifests/operator/rbac.yaml").read_text())
    return {
        (resource + (f".{group}" if group else ""), verb)
        for role in roles
        if role["kind"] in ("Role", "ClusterRole")
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def requests(plane: ControlPlane) -> Iterator[Right]:
    """What the operator asked for since the API server began."""
    for line in (plane.home / AUDIT_LOG).read_text().splitlines():
        event = json.loads(line)
        place = event.get("objectRef")
        if place is None or "resource" not in place:
            continue  # discovery
        sub, group = place.get("subresource"), place.get("apiGroup")
        resource = place["resource"] + (f"/{sub}" if sub else "") + (f".{group}" if group else "")
        yield resource, event["verb"]


EDITS: dict[str, Manifest] = {
    "ConfigMap/demo-peers": {"data": {"stranger": "x"}},
    "NetworkPolicy/demo-decode": {"spec": {"ingress": [{}]}},
    "PodDisruptionBudget/demo-decode": {"spec": {"maxUnavailable": 9}},
    "Role/demo-router": {"rules": []},
    "RoleBinding/demo-router": {
        "subjects": [{"kind": "ServiceAccount", "name": "stranger", "namespace": "default"}]
    },
    "Service/demo": {"spec": {"selector": {"a": "b"}}},
    "ServiceAccount/demo-router": {
        "metadata": {"labels": {"tandem.dev/service": "demo", "a": "b"}}
    },
}


def live(harness: Harness, router: FakeRouter, node: Node) -> None:
    """All that the operator may come to do for a service."""
    for each in foreign_objects().values():
        harness.make(each)
    harness.create(decode__scaling={"mode": "External"})
    harness.wait(lambda: harness.condition("Accepted")[1] == "NameTaken")
    for each in foreign_objects().values():
        harness.cluster.delete(each["kind"], harness.namespace, each["metadata"]["name"])
    harness.kubectl("create", "secret", "generic", "keys", "--from-literal=a=b")
    harness.kubectl("label", "secret", "keys", "tandem.dev/llmservices=allowed")
    harness.ready()
    _change_by_hand(harness)
    router.keys = [f"{role}.{n}" for role in ("prefill", "decode", "router") for n in (1, 2)]
    security = {"keyRotationID": "a", "networkPolicy": "Disabled"}
    auth = {"auth": {"apiKeysSecretRef": {"name": "keys"}}}
    decode = {"scaling": None, "replicas": 2}
    harness.change({"spec": {"security": security, "router": auth, "decode": decode}})
    source = {"persistentVolumeClaim": {"path": "other"}}
    harness.wait(lambda: "demo-router-g1" not in harness.key_pairs(), 60, "rotated")
    jobs = harness.names("Job")
    harness.change({"spec": {"model": {"source": source}, "decode": {"replicas": 1}}})
    harness.wait(lambda: harness.names("Job").isdisjoint(jobs), 60, "the first model's Job is gone")
    harness.wait(lambda: len(harness.names("ControllerRevision")) == 3, 60, "rolled")
    _lose_a_node(harness, node)


def _lose_a_node(harness: Harness, node: Node) -> None:
    with routers_apart(harness, node) as routers:
        routers.kubelet_lives = False
        harness.wait(routers.is_taken_out, 60, "taken out")


def _change_by_hand(harness: Harness) -> None:
    for place, patch in EDITS.items():
        kind, _, name = place.partition("/")
        harness.edit(kind, name, patch)
        found = harness.cluster.get(kind, harness.namespace, name)
        assert found is not None
        managers = [each["manager"] for each in found["metadata"]["managedFields"]]
        assert "tandem-operator" in managers
    deployment = sorted(harness.names("Deployment"))[0]
    harness.kubectl("set", "image", f"deployment/{deployment}", "main=other")


@pytest.mark.timeout(300)
def test_rights_are_used_and_what_is_used_is_granted(
    harness: Harness, plane: ControlPlane, router: FakeRouter, node: Node, silent: Silent
):
    """Over a service's whole life; a right that is not used needs its reason above."""
    live(harness, router, node)
    used = set(requests(plane))
    assert used - granted() == set(), "asked for and not granted"
    unused = granted() - used - set(SOMETIMES)
    assert unused == set(EXPLAINED), "granted and not used, or used and said not to be"


def test_nothing_is_granted_on_all_of_anything():
    """No star, no secret changed, nothing of nodes, namespaces or cluster-wide roles."""
    rights = granted()
    assert not [each for each in rights if "*" in "".join(each)]
    assert {verb for name, verb in rights if name == "secrets"}.isdisjoint({"update", "patch"})
    places = {name.partition(".")[0] for name, _ in rights}
    assert places.isdisjoint({"nodes", "namespaces", "clusterroles", "clusterrolebindings"})
