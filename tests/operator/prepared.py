"""An API server with Tandem's CRDs, the operator's rights and the controllers that it counts on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.operator.control_plane import ControlPlane, control_plane, start_controllers
from tests.operator.harness import OPERATOR_NAMESPACE
from tests.waiting import wait_for

_CONTROLLERS = (
    "deployment-controller",
    "replicaset-controller",
    "garbage-collector-controller",
    "job-controller",
)
_USER = "--user=operator"
"""Whose token operators get here (``OPERATOR_TOKEN``)."""


@contextmanager
def prepared(home: Path) -> Iterator[ControlPlane]:
    """While the block runs; its files lie below ``home``."""
    with control_plane(home) as running:
        apply_crds(running)
        start_controllers(running, _CONTROLLERS)
        running.kubectl("create", "namespace", OPERATOR_NAMESPACE)
        _grant(running)
        yield running


def apply_crds(plane: ControlPlane) -> None:
    """Tandem's, until all are served. Not by `kubectl wait`: one without conditions yet is an error
    to it."""
    plane.kubectl("apply", "--server-side", "-k", "manifests/crds")

    def are_served() -> bool:
        found = json.loads(plane.kubectl("get", "crd", "-o", "json"))["items"]
        conditions = [each.get("status", {}).get("conditions") or () for each in found]
        served = {"type": "Established", "status": "True"}.items()
        return all(any(served <= one.items() for one in each) for each in conditions)

    wait_for(are_served, 90, every=0.2)


def _grant(plane: ControlPlane) -> None:
    """The operator's own rights and what its writes are held to."""
    let_lead(plane, OPERATOR_NAMESPACE)
    policy = Path("manifests/operator/admission.yaml").read_text()
    account = f"system:serviceaccount:{OPERATOR_NAMESPACE}:tandem-operator"
    assert account in policy
    plane.kubectl("apply", "-f", "-", stdin=policy.replace(account, "operator"))
    name = "--clusterrole=tandem-operator"
    plane.kubectl("create", "clusterrolebinding", "operator", name, _USER)


def let_lead(plane: ControlPlane, namespace: str) -> None:
    """A Lease of a namespace's own, and the operator's right to it."""
    for each in ("rbac", "lease"):
        plane.kubectl("-n", namespace, "apply", "-f", f"manifests/operator/{each}.yaml")
    role = "--role=tandem-operator-lease"
    plane.kubectl("-n", namespace, "create", "rolebinding", "operator", role, _USER)


def make_namespace(plane: ControlPlane, name: str) -> None:
    """One with the restricted profile enforced, and a claim of models."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    metadata = {"name": name, "labels": labels}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    plane.send("POST", "/api/v1/namespaces", namespace)
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models"},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    plane.send("POST", f"/api/v1/namespaces/{name}/persistentvolumeclaims", claim)
