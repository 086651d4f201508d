"""The chart's agent on one node, and the folder in which pods of a namespace meet it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stack import parse_metrics
from tests.e2e_cluster import pods
from tests.e2e_cluster.images import reference
from tests.e2e_cluster.install import CHART, RELEASE, helm
from tests.e2e_cluster.kube import Json, Kube, wait_for
from tests.e2e_cluster.service import MOUNTED, prepare_namespace
from tests.e2e_cluster.setup import Setup
from tests.e2e_cluster.volumes import mount, remove_volumes
from tests.manifests import load_manifests

CLAIM = "node"
PORT = 9410
NAMESPACE = "e2e-node-agent"
"""Of its own, since it has to admit folders of hosts."""
UP_SECONDS = 120.0


@dataclass(frozen=True)
class Agent:
    kube: Kube

    def pod(self) -> Json | None:
        """The one pod, once it is ready."""
        found = self.kube.items("pods", f"app.kubernetes.io/name={RELEASE}-node-agent")
        return found[0] if found and pods.is_ready(found[0]) else None

    def series(self) -> dict[str, float]:
        pod: Json = wait_for("the node's agent", self.pod, seconds=UP_SECONDS)
        url = f"http://127.0.0.1:{PORT}/metrics"
        return parse_metrics(self.kube.read_url(pods.name_of(pod), url, container="agent"))

    def copied(self) -> float:
        return self.series()["tandem:kv_agent_copied_bytes_total"]


@contextmanager
def installed(
    cluster: Kube, setup: Setup, *, node: str, user: Kube, scraped_from: str = ""
) -> Iterator[Agent]:
    """What the chart makes of ``nodeAgent`` for a node and for the pods of ``user``'s namespace,
    which find the folder by the claim ``CLAIM``. Not waited for; gone afterwards. ``scraped_from``:
    the namespace whose pods may read its series; unless given, its own."""
    made = _rendered(node, user, scraped_from)
    volume = next(pods.name_of(each) for each in made if each["kind"] == "PersistentVolume")
    cluster.delete("namespace", NAMESPACE, seconds=120)
    metadata = {"name": NAMESPACE}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    kube = cluster.within(NAMESPACE)
    prepare_namespace(kube, setup)
    try:
        if setup.mounted:
            _add_packages(next(each for each in made if each["kind"] == "DaemonSet"))
        for each in made:
            cluster.within(each["metadata"].get("namespace", NAMESPACE)).apply(each)
        yield Agent(kube)
    finally:
        cluster.delete("namespace", NAMESPACE, "--wait=false")
        cluster.run("delete", "pv", volume, "--wait=false", "--ignore-not-found")
        remove_volumes(kube)


def _rendered(node: str, user: Kube, scraped_from: str) -> list[Json]:
    values = {
        "enabled": True,
        "image": reference("worker"),
        "visibleDevices": "void",
        "metricsPort": PORT,
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
        "nodeSelector": {"kubernetes.io/hostname": node},
        "claims": [{"namespace": user.namespace, "name": CLAIM}],
    }
    text = helm(
        user,
        *("template", RELEASE, str(CHART), "--namespace", NAMESPACE),
        *("--show-only", "templates/nodeagent.yaml"),
        *("--set-json", f"nodeAgent={json.dumps(values)}"),
        *("--set", f"metrics.namespace={scraped_from}"),
    )
    return load_manifests(text)


def meets_at(node: str) -> Json:
    """What a service's workers on the node have, that they meet its agent in its folder."""
    there = {"affinity": None, "nodeSelector": {"kubernetes.io/hostname": node}}
    folder = {"persistentVolumeClaim": {"claimName": CLAIM}}
    return {
        "kvTransfer": {
            "connector": "Auto",
            "nodeLocal": {"mode": "Required", "copy": "Agent", "volume": folder},
        },
        "prefill": {"podTemplate": {"spec": there}},
        "decode": {"podTemplate": {"spec": there}},
    }


def _add_packages(daemon_set: Json) -> None:
    """What a thin worker image lacks, as services of the suite have it."""
    spec = daemon_set["spec"]["template"]["spec"]
    volume, at = mount("mounted", "mounted", MOUNTED)
    spec["volumes"].append(volume)
    spec["containers"][0]["volumeMounts"].append(at)
