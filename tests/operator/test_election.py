"""The election alone: what it makes of Leases that are odd and of clients that fail."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.operator.control_plane import ControlPlane
from tests.operator.harness import poll

from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.loop.leader import Leader
from tandem.operator.loop.resync import Resync
from tandem.operator.metrics import OperatorMetrics
from tandem.operator.settings import OperatorSettings

SETTINGS = OperatorSettings(lease_seconds=1.5, renew_deadline=0.8, retry_seconds=0.1)


@pytest.fixture
def settings(namespace: str) -> OperatorSettings:
    """An election in a namespace of its own, quick enough to be watched."""
    return replace(SETTINGS, own_namespace=namespace)


class Faulty(Cluster):
    """A client that breaks in a way that nobody has thought of."""

    broken = False

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        """As the real one, until it is broken."""
        if self.broken:
            raise RuntimeError("a surprise")
        return super().get(kind, namespace, name)


@pytest.fixture
def faulty(plane: ControlPlane) -> Faulty:
    """A client of the administrator."""
    return Faulty(kubeconfig=plane.kubeconfig())


def test_a_lease_without_a_spec_is_free(cluster: Cluster, settings: OperatorSettings):
    """One that somebody else made, with nothing in it, holds up nobody."""
    metadata = {"name": settings.lease_name, "namespace": settings.own_namespace}
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
    cluster.create(lease)
    leader = Leader(cluster, settings, lost=lambda: None)
    leader.start()
    assert leader.acquired.wait(5)
    leader.release()
    found = cluster.get("Lease", settings.own_namespace, settings.lease_name)
    assert found is not None
    assert found["spec"].get("holderIdentity", "") == ""


def test_a_surprise_costs_a_try_and_no_election(faulty: Faulty, settings: OperatorSettings):
    """A standby goes on trying after an error that nobody foresaw."""
    faulty.broken = True
    leader = Leader(faulty, settings, lost=lambda: None)
    leader.start()
    time.sleep(0.4)
    assert leader.alive()
    faulty.broken = False
    assert leader.acquired.wait(5)
    leader.release()


def test_a_leader_that_only_gets_surprises_ends(faulty: Faulty, settings: OperatorSettings):
    """It cannot renew, whatever the reason: it ends before another leads."""
    ended: list[float] = []
    leader = Leader(faulty, settings, lost=lambda: ended.append(time.monotonic()))
    leader.start()
    assert leader.acquired.wait(5)
    broke = time.monotonic()
    faulty.broken = True
    assert poll(lambda: ended, 5) is not None
    assert ended[0] - broke < settings.lease_seconds


def test_a_standby_is_alive_however_long_it_waits(cluster: Cluster, settings: OperatorSettings):
    """The age of the last list counts from when this replica began to list."""
    resync = Resync(cluster, settings, lambda _: None, OperatorMetrics())
    time.sleep(0.2)
    assert resync.age() == 0


def test_no_account_and_no_kubeconfig_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A process that cannot know its API server ends with a sentence."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ClusterError, match="neither a pod's account nor a kubeconfig"):
        Cluster(kubeconfig=tmp_path / "nothing")
