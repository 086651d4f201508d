"""Folders of the nodes as claims: what the restricted profile allows in place of hostPath."""

from __future__ import annotations

from typing import Any

from tests.e2e_cluster.kube import Json, Kube

CLASS = "tandem-e2e"


def claim(kube: Kube, name: str, folder: str, *, write: bool = False) -> None:
    """A claim called ``name`` that shows each node's own ``folder``, bound at once."""
    volume = f"{kube.namespace}-{name}"
    mode = "ReadWriteMany" if write else "ReadOnlyMany"
    shared: dict[str, Any] = {"accessModes": [mode], "storageClassName": CLASS}
    bound = {"kind": "PersistentVolumeClaim", "namespace": kube.namespace, "name": name}
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume, "labels": {"tandem.dev/e2e": kube.namespace}},
            "spec": {
                **shared,
                "capacity": {"storage": "10Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"apiVersion": "v1", **bound},
                "hostPath": {"path": folder, "type": "DirectoryOrCreate"},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": kube.namespace},
            "spec": {
                **shared,
                "volumeName": volume,
                "resources": {"requests": {"storage": "1Gi"}},
            },
        },
    )


def remove_volumes(kube: Kube) -> None:
    """Remove the namespace's volumes; they belong to no namespace and stay otherwise."""
    kube.run("delete", "pv", "-l", f"tandem.dev/e2e={kube.namespace}", "--wait=false")


def mount(name: str, claim_name: str, path: str) -> tuple[Json, Json]:
    """A pod's volume of a claim, and its read-only mount."""
    source = {"claimName": claim_name, "readOnly": True}
    volume = {"name": name, "persistentVolumeClaim": source}
    return volume, {"name": name, "mountPath": path, "readOnly": True}
