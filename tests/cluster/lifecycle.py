"""Raising a cluster, ending and reviving a node of it, and taking all of it down again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster import (
    archives,
    build,
    certificates,
    cgroups,
    control_plane,
    enforcer,
    layout,
    machines,
    nodes,
)
from tests.cluster.machines import Machines
from tests.cluster.processes import ClusterError, run, wait_until

MANIFESTS = layout.HERE / "manifests"
READY = "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}"
MAX_NODES = 9


class Clock:
    """Prints what was reached, with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def reached(self, what: str) -> None:
        print(f"{time.monotonic() - self._start:6.2f} s  {what}", flush=True)


def kubectl(*arguments: str, seconds: float = 60.0, stdin: str | None = None) -> str:
    """Output of kubectl as the cluster's administrator."""
    binary = layout.BIN / "kubectl"
    return run(binary, "--kubeconfig", layout.KUBECONFIG, *arguments, seconds=seconds, stdin=stdin)


def up(count: int, *, metrics_server: bool = False) -> None:
    """Raise a cluster of ``count`` nodes; takes down first what an earlier run left.

    Returns once every node is ready, DNS answers and policies are enforced. Every archive in
    ``layout.IMAGES`` is imported. Raises ClusterError, and leaves the logs, when it fails.
    """
    if not 1 <= count <= MAX_NODES:
        raise ClusterError(f"nodes: {count}, but 1 to {MAX_NODES} are possible")
    build.check_machine()
    clock, fleet, names = Clock(), Machines(), layout.node_names(count)
    down()
    shutil.rmtree(layout.LOG, ignore_errors=True)
    layout.LOG.mkdir(parents=True)
    certificates.make(names)
    _bridge()
    control_plane.start(fleet)
    for node in names:
        nodes.start_runtime(fleet, node, count)
        nodes.route(fleet, node)
    fleet.save()
    _wait(fleet, "containerd", lambda: all(nodes.runtime_ready(fleet, node) for node in names))
    clock.reached("machines made, containerd listens")
    images = sorted(layout.IMAGES.glob("*.tar"))
    if metrics_server:
        images.append(build.METRICS_SERVER)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(archives.load, fleet, images)
        _wait(fleet, "the API server", _api_ready)
        clock.reached("API server ready")
        control_plane.start_controllers(fleet)
        _apply("coredns.yaml", *(["metrics-server.yaml"] if metrics_server else []))
        loading.result()
    clock.reached(f"{len(images)} images imported")
    for node in names:
        nodes.start_kubelet(fleet, node)
    _wait(fleet, "the nodes", lambda: ready_nodes() == count)
    clock.reached(f"{count} node(s) ready")
    enforcer.spawn()
    _wait(fleet, "DNS", _dns_ready)
    clock.reached("DNS ready")


def down() -> None:
    """End all that is or was the cluster, and remove everything but binaries, images and logs."""
    machines.end_all()
    cgroups.remove()
    shutil.rmtree(layout.STATE, ignore_errors=True)


def kill_node(node: str) -> None:
    """Cut a node's power: it falls silent in one moment, then all in it ends; its disk stays."""
    nodes.index_of(node)
    Machines.load().kill(node)


def revive_node(node: str) -> None:
    """Boot a killed node again, with its images still there; returns once it is ready."""
    fleet = Machines.load()
    nodes.start_runtime(fleet, node, len(fleet.nodes))
    nodes.route(fleet, node)
    fleet.save()
    _wait(fleet, "containerd", lambda: nodes.runtime_ready(fleet, node))
    nodes.start_kubelet(fleet, node)
    condition = f"--for=condition=Ready=true node/{node}".split()
    kubectl("wait", *condition, "--timeout=120s", seconds=130)


def load(files: Iterable[Path]) -> None:
    """Import image archives into the nodes of the running cluster."""
    archives.load(Machines.load(), files)


def ready_nodes() -> int:
    return _ask("get", "nodes", "-o", READY).split().count("True")


def _bridge() -> None:
    run("ip", "link", "add", layout.BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{layout.HOST}/24", "dev", layout.BRIDGE)
    run("ip", "link", "set", layout.BRIDGE, "up")


def _wait(fleet: Machines, what: str, condition: machines.Condition) -> None:
    try:
        wait_until(what, condition, seconds=90, alive=fleet.running)
    except ClusterError as error:
        raise ClusterError(f"{error}\nlogs are in {layout.LOG}") from error


def _ask(*arguments: str) -> str:
    """kubectl's answer, or nothing while the API server does not give one."""
    try:
        return kubectl(*arguments, seconds=10)
    except ClusterError:
        return ""


def _api_ready() -> bool:
    return _ask("get", "--raw=/readyz") == "ok"


def _dns_ready() -> bool:
    where = ("deployment", "coredns", "-n", "kube-system")
    return _ask("get", *where, "-o", "jsonpath={.status.readyReplicas}") == "2"


def _apply(*manifests: str) -> None:
    for manifest in manifests:
        kubectl("apply", "-f", str(MANIFESTS / manifest))
