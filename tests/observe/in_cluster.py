"""`make observe-cluster`: every panel and rule on a cluster of two nodes, raised here.

The chart's operator, two services whose pods kubelets run, and a Prometheus in a pod of the
namespace that the chart is told scrapes: it finds pods by the labels that the chart's monitors
select, past the NetworkPolicies. Clients ask through node ports. Workers of the service that is
placed by forecasts meet at an agent of their node and pull prefixes from each other.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from scripts.rules import chart, promtool
from tests.observe import report
from tests.observe.asked import PULLING, ROUTERS, asking, everything
from tests.observe.prometheus import EVERY, Prometheus
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e_cluster.kube import Kube
    from tests.e2e_cluster.setup import Setup

OUT = Path("docs/observability-cluster.md")
IMAGE = "docker.io/local/prometheus:1"
NAMESPACE, SERVICES = "monitoring", "observed"
PORT, NODE_PORT = 9090, 30990
UP_SECONDS = 180.0
WORKERS = ["--device", "cpu", "--num-gpu-blocks-override", "400", "--kv-offloading-size", "0.1"]
_KEPT = {
    "namespace": "__meta_kubernetes_namespace",
    "pod": "__meta_kubernetes_pod_name",
    "tandem_dev_service": "__meta_kubernetes_pod_label_tandem_dev_service",
    "tandem_dev_role": "__meta_kubernetes_pod_label_tandem_dev_role",
    "tandem_dev_revision": "__meta_kubernetes_pod_label_tandem_dev_revision",
}


def main() -> int:
    """Write the page; 1 where a rule failed or an answer is not a finite number."""
    parser = argparse.ArgumentParser(prog="python -m tests.observe.in_cluster", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="page to write")
    parser.add_argument("--clients", type=int, default=2, help="clients that ask each at once")
    parser.add_argument("--seconds", type=float, default=120.0, help="load before the questions")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each board")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))  # the suite's helpers stand on it
    from tests.e2e_cluster.raised import raised

    program = promtool.build("prometheus")
    with raised(program, IMAGE) as (cluster, setup), ExitStack() as open_:
        seen = _observe(cluster, setup, options, open_)
    day = datetime.now(UTC).date().isoformat()
    options.out.write_text(report.page(seen, _told(options), day))
    print(report.summary(seen))
    return int(bool(report.faults(seen)))


def _told(options: argparse.Namespace) -> report.Told:
    return report.Told(
        command="make observe-cluster",
        what=[
            "- A cluster of two nodes. Prometheus runs in a pod with the chart's monitors.",
            "- The chart's operator, and two services on CPUs, each with a router, a prefill and a",
            "  decode worker. The second one uses a node agent and prefix fetch.",
            f"- {options.clients} clients load each service for {options.seconds:.0f} s.",
            "- One decode worker is killed, and one child object is deleted.",
        ],
    )


def _observe(
    cluster: Kube, setup: Setup, options: argparse.Namespace, open_: ExitStack
) -> report.Seen:
    from tests.e2e_cluster import access
    from tests.e2e_cluster.install import install
    from tests.e2e_cluster.node_agent import installed, meets_at
    from tests.e2e_cluster.service import Service, prepare_namespace

    install(cluster, {"metrics.namespace": NAMESPACE})
    for name in (NAMESPACE, SERVICES):
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    kube = cluster.within(SERVICES)
    prepare_namespace(kube, setup)
    node = min(each["metadata"]["name"] for each in cluster.items("nodes"))
    agent = installed(cluster, setup, node=node, user=kube, scraped_from=NAMESPACE)
    open_.enter_context(agent)
    services = []
    for name, flags in ROUTERS.items():
        changes: dict[str, Any] = {
            "engine": {"extraArgs": WORKERS, "maxNumBatchedTokens": 128},
            "router": {"extraArgs": flags},
        }
        if name in PULLING:
            changes |= meets_at(node)
            changes["kvTransfer"]["pullPeers"] = 1
            changes["engine"]["maxNumSeqs"] = 2
        services.append(Service(kube, setup, name=name, changes=changes))
        services[-1].apply()
    cluster.within(NAMESPACE).apply(*_prometheus())
    for service in services:
        service.wait_ready(UP_SECONDS)
    prometheus = Prometheus(f"http://{access.node_address(cluster)}:{NODE_PORT}")
    open_.callback(prometheus.close)
    wait_for(prometheus.ready, UP_SECONDS, seen=lambda: "Prometheus is not ready")
    # Replicas of the operator, the node's agent, and a pod of each role.
    expected = 2 + 1 + 3 * len(services)
    wait_for(
        lambda: prometheus.targets_up() >= expected,
        UP_SECONDS,
        seen=lambda: f"{prometheus.targets_up()} of {expected} targets answer",
    )
    for service in services:
        open_.enter_context(asking(service.name, service.url(), options.clients))
    time.sleep(options.seconds / 2)
    ended = services[-1].pods("decode")[0]["metadata"]["name"]
    kube.execute(ended, "python3", "-c", "import os, signal; os.kill(1, signal.SIGTERM)")
    kube.run("delete", "poddisruptionbudget", "--all", "--wait=false")
    services[-1].wait_ready(UP_SECONDS)
    time.sleep(options.seconds / 2)
    return everything(prometheus, options.pictures)


def _prometheus() -> list[dict[str, Any]]:
    """The pod, what it may read, its configuration and a node port."""
    labels = {"app": "prometheus"}
    own = {"name": "prometheus", "namespace": NAMESPACE}
    role = {"name": "observe-prometheus"}
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    rbac = "rbac.authorization.k8s.io"
    pod = {
        "serviceAccountName": "prometheus",
        "containers": [
            {
                "name": "prometheus",
                "image": IMAGE,
                "imagePullPolicy": "Never",
                "args": [
                    "--config.file=/etc/prometheus/prometheus.yaml",
                    "--storage.tsdb.path=/data/tsdb",
                    f"--web.listen-address=:{PORT}",
                ],
                "volumeMounts": [
                    {"name": "config", "mountPath": "/etc/prometheus"},
                    {"name": "data", "mountPath": "/data"},
                ],
            }
        ],
        "volumes": [
            {"name": "config", "configMap": {"name": "prometheus"}},
            {"name": "data", "emptyDir": {}},
        ],
    }
    files = {
        "prometheus.yaml": yaml.safe_dump(_config()),
        "rules.yaml": yaml.safe_dump(chart.rule_file(None, None), width=1000),
    }
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": own},
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": role, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": role,
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", **role},
            "subjects": [{"kind": "ServiceAccount", **own}],
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": own, "data": files},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {**own, "labels": labels}, "spec": pod},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": own,
            "spec": {
                "type": "NodePort",
                "selector": labels,
                "ports": [{"port": PORT, "nodePort": NODE_PORT}],
            },
        },
    ]


def _config() -> dict[str, Any]:
    """Pods and ports as the chart's PodMonitor and ServiceMonitor choose them."""
    relabel: list[dict[str, Any]] = [
        {
            "source_labels": ["__meta_kubernetes_pod_label_app_kubernetes_io_name"],
            "regex": "tandem|tandem-operator|tandem-node-agent",
            "action": "keep",
        },
        {
            "source_labels": ["__meta_kubernetes_pod_container_port_name"],
            "regex": "http-metrics|http",
            "action": "keep",
        },
    ]
    relabel += [{"source_labels": [source], "target_label": to} for to, source in _KEPT.items()]
    job = {
        "job_name": "tandem",
        "kubernetes_sd_configs": [{"role": "pod"}],
        "relabel_configs": relabel,
    }
    return {
        "global": {"scrape_interval": EVERY, "evaluation_interval": EVERY},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [job],
    }


if __name__ == "__main__":
    sys.exit(main())
