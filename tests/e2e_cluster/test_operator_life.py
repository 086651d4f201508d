"""Services made anew under their own names, and an API server that hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from tests.cluster.machines import Machines
from tests.e2e_cluster.install import Installed
from tests.e2e_cluster.kube import KubeError, wait_for
from tests.e2e_cluster.service import KIND, Service

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

TIMES = 2
HANG_SECONDS = 30.0
"""Longer than a Lease lasts."""


@pytest.mark.nightly
def test_a_service_is_deleted_and_made_again_at_once(service: Service) -> None:
    """Twice in a row, while pods of the former life linger on the same nodes: each one is
    Ready and answers."""
    for _ in range(TIMES):
        service.kube.delete(KIND, service.name, "--wait=true", seconds=60)
        service.apply()
        service.wait_ready(240)
        assert "Paris" in service.ask()


@pytest.mark.nightly
def test_a_service_is_replaced_by_force(service: Service) -> None:
    """`kubectl replace --force` is a deletion and a creation in one command."""
    found = service.get()
    for field in ("managedFields", "resourceVersion", "uid", "creationTimestamp", "generation"):
        found["metadata"].pop(field, None)
    found.pop("status", None)
    service.kube.run("replace", "--force", "-f", "-", stdin=json.dumps(found), seconds=120)
    service.wait_ready(240)
    assert "Paris" in service.ask()


@contextlib.contextmanager
def hung_api_server() -> Iterator[None]:
    """The API server accepts connections and answers nothing."""
    pids = [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if b"kube-apiserver" in _command(process) and _space(process) in _machines()
    ]
    assert pids, "no API server of ours runs"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:  # what brought it into its machine stood still with it
            os.kill(pid, signal.SIGCONT)
            os.kill(psutil.Process(pid).ppid(), signal.SIGCONT)


def _command(process: Path) -> bytes:
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_bytes().partition(b"\0")[0]
    return b""


def _space(process: Path) -> str:
    """The process's namespace of PIDs; empty when it is gone."""
    with contextlib.suppress(OSError):
        return str((process / "ns" / "pid").readlink())
    return ""


def _machines() -> set[str]:
    """Namespaces of PIDs of this cluster's machines."""
    return {_space(Path(f"/proc/{pid}")) for pid in Machines.load().holders.values()} - {""}


@pytest.mark.nightly
def test_a_hung_api_server_leaves_one_leader(
    service: Service, operator: Installed, own_cluster: None
) -> None:
    """The leader ends while its calls hang, before its Lease is free; then one leads, and users
    notice nothing of it but what Kubernetes does by itself."""
    before, ended, url = operator.identity(), operator.restarts(), service.url()
    assert before, "nobody leads"
    with hung_api_server():
        until = time.monotonic() + HANG_SECONDS
        while time.monotonic() < until:
            assert "Paris" in service.ask(at=url)
            time.sleep(2.0)

    def one_leads() -> bool:
        with contextlib.suppress(KubeError):
            return operator.identity() not in ("", before)
        return False

    wait_for("another leader, or the same pod anew", one_leads, seconds=120)
    # The standby may lead before the kubelet, whose calls hung as well, has told of the end.
    wait_for("word of the leader's end", lambda: operator.restarts() > ended, seconds=60)
    pod = operator.kube.get("pod", before.partition("_")[0])
    (container,) = pod["status"]["containerStatuses"]
    assert container["lastState"]["terminated"]["exitCode"] == 3
    said = operator.kube.run("logs", before.partition("_")[0], "--previous")
    assert "the Lease could not be renewed" in said, "it ended as another led already"
    service.wait_ready(120)

    def answered() -> bool:
        # Nodes that could not report may be taken for lost as it goes on, and their pods out of
        # Services, until they do: seconds.
        with contextlib.suppress(httpx.ConnectError):
            return "Paris" in service.ask(at=url)
        return False

    wait_for("an answer", answered, seconds=60)
