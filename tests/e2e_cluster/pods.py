"""What the suite asks of pods: where they are, since when, and what their metrics say."""

from __future__ import annotations

from datetime import datetime

from stack import parse_metrics
from tests.e2e_cluster.images import reference
from tests.e2e_cluster.kube import Json, Kube, conditions

from tandem.protocol.names import LABEL_COMPONENT, LABEL_INSTANCE, PROBE_PORT, ROUTER_PORT


def of_role(kube: Kube, service: str, role: str) -> list[Json]:
    """Pods of one role that are not being deleted, by name."""
    pods = kube.items("pods", f"{LABEL_INSTANCE}={service},{LABEL_COMPONENT}={role}")
    staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    return sorted(staying, key=name_of)


def name_of(thing: Json) -> str:
    return str(thing["metadata"]["name"])


def node_of(pod: Json) -> str | None:
    """Node that a pod is on, or None while it is on none."""
    node: str | None = pod["spec"].get("nodeName")
    return node


def is_ready(pod: Json) -> bool:
    return conditions(pod).get("Ready", {}).get("status") == "True"


def ready_since(pod: Json) -> datetime | None:
    """When a pod became ready, to the second."""
    return since(pod, "Ready")


def since(pod: Json, condition: str) -> datetime | None:
    """When a condition of a pod became true, to the second."""
    found = conditions(pod).get(condition)
    if found is None or found["status"] != "True":
        return None
    return datetime.fromisoformat(found["lastTransitionTime"])


def started(pod: Json) -> datetime | None:
    """When the container main last started, to the second."""
    for container in pod["status"].get("containerStatuses", []):
        if container["name"] == "main" and "running" in container["state"]:
            return datetime.fromisoformat(container["state"]["running"]["startedAt"])
    return None


def restarts(pod: Json) -> int:
    return sum(each["restartCount"] for each in pod["status"].get("containerStatuses", []))


def metrics(kube: Kube, pod: Json) -> dict[str, float]:
    """Samples of a pod, ``name{labels}`` to value, as the pod itself reads them."""
    role = pod["metadata"]["labels"].get(LABEL_COMPONENT)
    port = ROUTER_PORT if role == "router" else PROBE_PORT
    return parse_metrics(kube.read_url(name_of(pod), f"http://127.0.0.1:{port}/metrics"))


def total(samples: dict[str, float], metric: str, label: str = "") -> float:
    """Sum of a metric's samples whose labels contain ``label``."""
    return sum(
        value
        for sample, value in samples.items()
        if sample.partition("{")[0] == metric and label in sample
    )


def bystander(name: str, labels: dict[str, str] | None = None) -> Json:
    """A pod with Python and ZeroMQ that does nothing by itself."""
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    main = {
        "name": "main",
        "image": reference("router"),
        "command": ["sleep", "3600"],
        "securityContext": security,
    }
    spec = {
        "containers": [main],
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    metadata = {"name": name, "labels": labels or {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
