"""What the suite does to pods that they cannot see coming."""

from __future__ import annotations

from tests.cluster import layout
from tests.cluster.machines import Machines
from tests.e2e_cluster import pods
from tests.e2e_cluster.kube import Json, Kube
from tests.e2e_cluster.setup import Setup


def kill_container(kube: Kube, setup: Setup, pod: Json, container: str = "main") -> None:
    """SIGKILL to a container's processes; kubelet starts it again.

    Only on our own nodes: a process cannot kill PID 1 of its own container. Elsewhere the pod is
    deleted without grace, which is the nearest to it that an API server offers.
    """
    if not setup.is_own:
        kube.delete("pod", pods.name_of(pod), "--grace-period=0", "--force")
        return
    statuses = pod["status"]["containerStatuses"]
    found = next(each for each in statuses if each["name"] == container)
    identity = found["containerID"].rpartition("/")[2]
    kill = (layout.BIN / "ctr", "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", identity)
    Machines.load().inside(str(pods.node_of(pod)), *kill)
