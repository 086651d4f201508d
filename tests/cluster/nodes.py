"""A node's machine: its network, containerd, kubelet and kube-proxy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.cluster import cgroups, layout
from tests.cluster.machines import Machines
from tests.cluster.processes import ClusterError, run

CNI_PLUGINS = "/usr/lib/cni"
SOCKET = "/run/containerd/containerd.sock"
LEASE_SECONDS = 8
"""kubelet renews its Lease four times within this; the controllers wait a little longer."""

CONTAINERD = """\
version = 3
root = "{home}/containerd"
state = "/run/containerd"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "docker.io/local/pause:1"
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true       # for a root without CAP_SYS_RESOURCE
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["{plugins}"]
conf_dir = "{home}/cni"
"""


def index_of(node: str) -> int:
    """A node's number, counted from 1. Raises ClusterError for another machine's name."""
    number = node.removeprefix("node")
    if not number.isdigit():
        raise ClusterError(f"{node!r} is no node; nodes are called node1, node2, …")
    return int(number)


def start_runtime(machines: Machines, node: str, others: int) -> None:
    """The machine, its routes to the pods of ``others`` nodes in all, and containerd."""
    index, home = index_of(node), layout.STATE / node
    (home / "cni").mkdir(parents=True, exist_ok=True)
    machines.start(node, layout.node_address(index))
    forward = ("net.ipv4.ip_forward=1", "net.bridge.bridge-nf-call-iptables=1")
    machines.inside(node, "sysctl", "-qw", *forward)
    for other in range(1, others + 1):
        if other != index:
            way = (layout.pod_network(other), "via", layout.node_address(other))
            machines.inside(node, "ip", "route", "replace", *way)
    (home / "containerd.toml").write_text(CONTAINERD.format(home=home, plugins=CNI_PLUGINS))
    (home / "cni" / "10-bridge.conflist").write_text(json.dumps(_pod_network(index)))
    path = f"PATH={layout.BIN}:{os.environ['PATH']}"
    binary = layout.BIN / "containerd"
    title = f"{node}-containerd"
    machines.spawn(node, title, "env", path, binary, "-c", home / "containerd.toml")


def route(machines: Machines, node: str) -> None:
    """Let the host and the API server reach the node's pods; node1 also stands for services."""
    index = index_of(node)
    networks = [layout.pod_network(index)] + ([layout.SERVICES] if index == 1 else [])
    for network in networks:
        way = ("ip", "route", "replace", network, "via", layout.node_address(index))
        run(*way)
        machines.inside(layout.CONTROL_PLANE, *way)


def runtime_ready(machines: Machines, node: str) -> bool:
    return Path(f"/proc/{machines.holders[node]}/root{SOCKET}").exists()


def start_kubelet(machines: Machines, node: str) -> None:
    """kubelet and kube-proxy, once the API server answers and containerd listens."""
    home, address = layout.STATE / node, layout.node_address(index_of(node))
    cgroups.make(node)
    (home / "resolv.conf").write_text(f"nameserver {layout.HOST}\n")
    machines.spawn(
        node,
        f"{node}-kubelet",
        layout.BIN / "kubelet",
        f"--kubeconfig={layout.PKI / node}.kubeconfig",
        f"--root-dir={home / 'kubelet'}",
        f"--hostname-override={node}",
        f"--node-ip={address}",
        f"--config={_write(home / 'kubelet.json', _kubelet(node, address))}",
    )
    config = _write(home / "kube-proxy.json", _proxy(node, address))
    machines.spawn(node, f"{node}-kube-proxy", layout.BIN / "kube-proxy", f"--config={config}")


def _kubelet(node: str, address: str) -> dict[str, Any]:
    home = layout.STATE / node
    low_disk = {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"}
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "failSwapOn": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroups.root_of(node),
        "address": address,
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "podLogsDir": str(home / "pods"),
        "tlsCertFile": str(layout.PKI / f"{node}-serving.crt"),
        "tlsPrivateKeyFile": str(layout.PKI / f"{node}-serving.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.PKI / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "clusterDNS": [layout.DNS],
        "clusterDomain": "cluster.local",
        "resolvConf": str(home / "resolv.conf"),
        "nodeLeaseDurationSeconds": LEASE_SECONDS,
        "nodeStatusUpdateFrequency": "4s",
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": low_disk,
    }


def _proxy(node: str, address: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "hostnameOverride": node,
        "clientConnection": {"kubeconfig": str(layout.PKI / "proxy.kubeconfig")},
        "clusterCIDR": f"{layout.PODS}.0.0/16",
        "mode": "nftables",
        "bindAddress": address,
        "conntrack": {"maxPerCore": 0, "min": 0},
    }


def _pod_network(index: int) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "dataDir": "/run/cni",
        "ranges": [[{"subnet": layout.pod_network(index)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    plugins = [{**bridge, "ipam": addresses}, ports]
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}


def _write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path
