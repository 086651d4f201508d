"""Where the test cluster keeps its things, and which names and addresses it takes on the machine.

Everything lies below one folder that git ignores; ``TANDEM_CLUSTER_DIR`` moves it. Addresses are
fixed, so there is one cluster at a time on a machine. Every other module of this folder reads this.
"""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
ROOT = Path(os.environ.get("TANDEM_CLUSTER_DIR", REPOSITORY / ".cluster")).resolve()

BIN = ROOT / "bin"
"""Compiled components; kept by ``down``."""
IMAGES = ROOT / "images"
"""Image archives that every ``up`` imports; kept by ``down``."""
STATE = ROOT / "state"
"""One cluster's life: certificates, etcd, containerd; removed by ``down``."""
LOG = ROOT / "log"
"""Logs of the latest cluster, a file a component; kept by ``down``, emptied by ``up``."""
VOLUMES = STATE / "volumes"
"""Folders that a test may use behind hostPath volumes: ``VOLUMES/NODE/NAME``."""
PKI = STATE / "pki"
KUBECONFIG = PKI / "admin.kubeconfig"
MACHINES = STATE / "machines.json"
"""Name of each machine and the PID of its first process."""

VERSION = "v1.36.3"
"""What Kubernetes calls itself; go.mod pins the sources."""

CONTROL_PLANE = "cp"
NETWORK = "10.89.0"
HOST = f"{NETWORK}.1"
"""The bridge's own address: this machine, as pods see it."""
API_ADDRESS = f"{NETWORK}.2"
API_PORT = 6443
PODS = "10.88"
SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS = "10.96.0.10"

LINK = "tandemk8s-"
BRIDGE = f"{LINK}br"
CGROUP = "tandemcluster"
MARK = "TANDEM_CLUSTER_MACHINE"
"""Stands in the environment of every process that ``down`` has to end."""


def node_names(count: int) -> dict[str, str]:
    """Nodes of a cluster with their addresses: node1, node2, …"""
    return {f"node{index}": node_address(index) for index in range(1, count + 1)}


def node_address(index: int) -> str:
    """Address of the node with this number, counted from 1."""
    return f"{NETWORK}.{10 + index}"


def pod_network(index: int) -> str:
    """Network of the pods on the node with this number."""
    return f"{PODS}.{index}.0/24"
