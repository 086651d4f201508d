"""Packages for model Jobs of the release before, whose thin worker image lacks torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.e2e_cluster import volumes
from tests.e2e_cluster.kube import Json, Kube
from tests.e2e_cluster.service import MOUNTED

POLICY = "tandem-e2e-older-packages"


@contextmanager
def packages_in_jobs(kube: Kube) -> Iterator[None]:
    """Mount the packages of the thin worker image in Jobs of the namespace.

    The older release's `tandem prepare` imports torch, and its Job takes no volumes of a
    podTemplate. So the API server adds them, as it would for a cluster's own policies.
    """
    policy, binding = _policy(kube.namespace)
    kube.apply(policy, binding)
    try:
        yield
    finally:
        for each in (binding, policy):
            kube.delete(each["kind"], POLICY)


def _policy(namespace: str) -> tuple[Json, Json]:
    volume, mount = volumes.mount("mounted", "mounted", MOUNTED)
    claim = volume["persistentVolumeClaim"]["claimName"]
    pod = "Object.spec.template.spec"
    patches = (
        (
            f'JSONPatch{{op: "add", path: "/spec/template/spec/volumes/-", value: {pod}.volumes{{'
            f'name: "{volume["name"]}", '
            f"persistentVolumeClaim: {pod}.volumes.persistentVolumeClaim{{"
            f'claimName: "{claim}", readOnly: true}}}}}}'
        ),
        (
            'JSONPatch{op: "add", path: "/spec/template/spec/containers/0/volumeMounts/-", value: '
            f'{pod}.containers.volumeMounts{{name: "{mount["name"]}", '
            f'mountPath: "{mount["mountPath"]}", readOnly: true}}}}'
        ),
    )
    api = "admissionregistration.k8s.io/v1"
    jobs = {
        "apiGroups": ["batch"],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["jobs"],
    }
    only = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    policy = {
        "apiVersion": api,
        "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": POLICY},
        "spec": {
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "matchConstraints": {"namespaceSelector": only, "resourceRules": [jobs]},
            "mutations": [
                {
                    "patchType": "JSONPatch",
                    "jsonPatch": {"expression": f"[{', '.join(patches)}]"},
                }
            ],
        },
    }
    binding = {
        "apiVersion": api,
        "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": POLICY},
        "spec": {"policyName": POLICY},
    }
    return policy, binding
