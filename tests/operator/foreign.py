"""Objects of somebody else under the names that the demo's children need."""

from __future__ import annotations

from typing import Any

from tests.operator.test_children import facts

from tandem.operator.desired.compose import desired
from tandem.operator.desired.naming import Manifest, Role

_POD: Manifest = {"containers": [{"name": "x", "image": "x"}]}
_ONCE = {"metadata": {"labels": {"a": "b"}}, "spec": {**_POD, "restartPolicy": "Never"}}
_PODS = {"metadata": {"labels": {"a": "b"}}, "spec": _POD}
_SELECTOR = {"matchLabels": {"a": "b"}}
_RBAC = "rbac.authorization.k8s.io"


def _object(kind: str, version: str, name: str, **more: Any) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **more}


def foreign_objects() -> dict[str, Manifest]:
    """One for each kind of child, as a person or another controller would have made it.

    Secrets aside: their names have the service's UID in them.
    """
    given = facts(decode__scaling={"mode": "External"})
    decode = f"demo-decode-{given.revision(Role.DECODE)}"
    created = desired(given, {}, {}).created
    (job,) = [each["metadata"]["name"] for each in created if each["kind"] == "Job"]
    made = [*_plain(), *_access(), *_workloads(decode, job)]
    return {each["kind"]: each for each in made}


def _plain() -> list[Manifest]:
    scaler = {"serviceName": "other", "role": "Decode", "replicas": 1}
    ports = {"ports": [{"port": 1}], "selector": {"a": "b"}}
    policy: Manifest = {"podSelector": {}}
    budget = {"selector": _SELECTOR}
    return [
        _object("ConfigMap", "v1", "demo-peers", data={"decode.1.public": "theirs"}),
        _object("LLMRoleScaler", "tandem.dev/v1alpha1", "demo-decode", spec=scaler),
        _object("NetworkPolicy", "networking.k8s.io/v1", "demo-decode", spec=policy),
        _object("PodDisruptionBudget", "policy/v1", "demo-router", spec=budget),
        _object("Service", "v1", "demo", spec=ports),
    ]


def _access() -> list[Manifest]:
    subject = {"kind": "ServiceAccount", "name": "x", "namespace": "x"}
    role = {"apiGroup": _RBAC, "kind": "Role", "name": "x"}
    return [
        _object("Role", f"{_RBAC}/v1", "demo-router", rules=[]),
        _object("RoleBinding", f"{_RBAC}/v1", "demo-router", roleRef=role, subjects=[subject]),
        _object("ServiceAccount", "v1", "demo-router"),
    ]


def _workloads(decode: str, job: str) -> list[Manifest]:
    return [
        _object("ControllerRevision", "apps/v1", decode, revision=7, data={"a": 1}),
        _object("Deployment", "apps/v1", decode, spec={"selector": _SELECTOR, "template": _PODS}),
        _object("Job", "batch/v1", job, spec={"template": _ONCE, "suspend": True}),
    ]
