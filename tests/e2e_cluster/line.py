"""Router, prefill and decode pods written by hand: the line on Kubernetes without the operator.

Shows what the images and the router's discovery are good for by themselves. The operator's own
children are richer; they are tested through it.
"""

from __future__ import annotations

from typing import Any

from tests.e2e_cluster.images import reference
from tests.e2e_cluster.kube import Json, Kube
from tests.e2e_cluster.setup import Setup
from tests.e2e_cluster.volumes import mount

from tandem.protocol import names

NAME = "line"
MODEL = f"{names.PATH_MODELS}/smollm2"
SECRET = "of the pods that are made by hand"
THREADS = {"name": "OMP_NUM_THREADS", "value": "1"}


def worker(setup: Setup, role: str, node: str | None) -> Json:
    """A worker pod, on a node if one is named."""
    args = [role, "--model", MODEL, "--served-model-name", "smollm2"]
    args += ["--host", "0.0.0.0", "--kv-control-host", "0.0.0.0"]
    args += ["--allow-plaintext", "--kv-secret", SECRET, "--kv-data-port", str(names.DATA_PORT)]
    args += ["--num-gpu-blocks-override", "512", "--kv-connector", "nixl"]
    args += ["--kv-advertise-host", f"$({names.ENV_POD_IP})"]
    volumes = [mount("models", "models", names.PATH_MODELS)]
    if setup.mounted:
        volumes.append(mount("mounted", "mounted", "/opt/tandem-mounted"))
    ports = f"{names.DATA_PORT}-{names.DATA_PORT + names.DATA_PORTS - 1}"
    pod = _pod(role, "worker", args, volumes, [{"name": "UCX_TCP_PORT_RANGE", "value": ports}])
    if node:
        pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    return pod


def router() -> Json:
    """The router's pod; it finds the workers by their labels."""
    args = ["router", "--model", MODEL, "--served-model-name", "smollm2"]
    args += ["--host", "0.0.0.0", "--ready-prefill", "1"]
    args += ["--allow-plaintext"]  # pods by hand have no keys
    selector = f"{names.LABEL_SERVICE}={NAME},{names.LABEL_ROLE}"
    env = [
        {"name": names.ENV_POD_NAMESPACE, "valueFrom": _field("metadata.namespace")},
        {"name": names.ENV_DISCOVERY_SELECTOR, "value": selector},
    ]
    pod = _pod("router", "router", args, [mount("models", "models", names.PATH_MODELS)], env)
    pod["spec"] |= {"serviceAccountName": NAME, "automountServiceAccountToken": True}
    pod["spec"]["containers"][0]["readinessProbe"] = _probe(names.ROUTER_PORT)
    del pod["metadata"]["labels"][names.LABEL_ROLE]
    return pod


def rights(kube: Kube) -> list[Json]:
    """The router's account: it may see pods of its namespace, and nothing else."""
    meta = {"name": NAME, "namespace": kube.namespace}
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    group = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": meta, "rules": [rule]},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": NAME},
            "subjects": [{"kind": "ServiceAccount", **meta}],
        },
    ]


def _pod(
    role: str, image: str, args: list[str], mounts: list[tuple[Json, Json]], env: list[Any]
) -> Json:
    labels = {names.LABEL_INSTANCE: NAME, names.LABEL_COMPONENT: role}
    labels |= {names.LABEL_SERVICE: NAME, names.LABEL_ROLE: role}
    own = [
        {"name": names.ENV_POD_IP, "valueFrom": _field("status.podIP")},
        {"name": names.ENV_CACHE, "value": "/tmp"},
        THREADS,
    ]
    main = {
        "name": "main",
        "image": reference(image),
        "imagePullPolicy": "IfNotPresent",
        "args": args,
        "env": [*own, *env],
        "readinessProbe": _probe(names.PROBE_PORT),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *(each for _, each in mounts)],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    spec = {
        "containers": [main],
        "volumes": [{"name": "tmp", "emptyDir": {}}, *(each for each, _ in mounts)],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 20,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    metadata = {"name": role, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _probe(port: int) -> Json:
    return {"httpGet": {"path": "/ready", "port": port}, "periodSeconds": 1, "timeoutSeconds": 5}


def _field(path: str) -> Json:
    return {"fieldRef": {"fieldPath": path}}
