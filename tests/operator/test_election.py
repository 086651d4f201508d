"""The election alone: what it makes of Leases that are odd and of clients that fail."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.operator.control_plane import ControlPlane
from tests.operator.harness import PATIENCE, poll

from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.cluster.fence import Fence, FencedOff
from tandem.operator.cluster.store import Store
from tandem.operator.loop.leader import Leader, Watchdog
from tandem.operator.loop.resync import Resync
from tandem.operator.metrics import OperatorMetrics
from tandem.operator.settings import OperatorSettings

SETTINGS = OperatorSettings(lease_seconds=1.5, renew_deadline=0.8, retry_seconds=0.1)
LASTING = replace(SETTINGS, lease_seconds=SETTINGS.renew_deadline + 5.0)
"""As long from the deadline to another's turn as by default: threads of a busy machine are late."""
CALM = replace(SETTINGS, lease_seconds=30.0, renew_deadline=20.0)
"""A leader that keeps its Lease however late its threads are."""


@pytest.fixture
def settings(namespace: str) -> OperatorSettings:
    """An election in a namespace of its own, quick enough to be watched."""
    return replace(SETTINGS, own_namespace=namespace)


@pytest.fixture
def lasting(cluster: Cluster, namespace: str) -> OperatorSettings:
    """One whose leader notices as soon, and is succeeded later; its Lease is there, and free."""
    settings = replace(LASTING, own_namespace=namespace)
    make_lease(cluster, settings)
    return settings


@pytest.fixture
def calm(cluster: Cluster, namespace: str) -> OperatorSettings:
    """One in which nothing lapses while a test lasts; its Lease is there, and free."""
    settings = replace(CALM, own_namespace=namespace)
    make_lease(cluster, settings)
    return settings


def make_lease(cluster: Cluster, settings: OperatorSettings) -> None:
    metadata = {"name": settings.lease_name, "namespace": settings.own_namespace}
    cluster.create({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata})


class Faulty(Cluster):
    """A client that breaks in a way that nobody has thought of."""

    broken = False

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        if self.broken:
            raise RuntimeError("a surprise")
        return super().get(kind, namespace, name)


@pytest.fixture
def faulty(plane: ControlPlane) -> Faulty:
    return Faulty(kubeconfig=plane.kubeconfig())


def holder(cluster: Cluster, settings: OperatorSettings) -> str:
    found = cluster.get("Lease", settings.own_namespace, settings.lease_name)
    assert found is not None
    name: str = found["spec"].get("holderIdentity", "")
    return name


@pytest.mark.full
def test_a_lease_without_a_spec_is_free(cluster: Cluster, calm: OperatorSettings):
    """One that somebody else made, with nothing in it, holds up nobody."""
    leader = Leader(cluster, calm, lost=lambda: None)
    leader.start()
    assert leader.acquired.wait(PATIENCE)
    leader.release()
    assert holder(cluster, calm) == ""


class Slow(Cluster):
    """A client whose calls take longer than the time between two of them."""

    seconds = 0.0
    under_way = threading.Event()

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        if self.seconds:
            self.under_way.set()
            time.sleep(self.seconds)
        return super().get(kind, namespace, name)


@pytest.mark.full
def test_a_lease_is_given_back_though_a_renewal_is_under_way(
    plane: ControlPlane, calm: OperatorSettings
):
    """Its call is waited for: else a slow API server makes the next leader wait for the lapse."""
    client = Slow(kubeconfig=plane.kubeconfig())
    leader = Leader(client, calm, lost=lambda: None)
    leader.start()
    assert leader.acquired.wait(PATIENCE)
    client.seconds = 5 * calm.retry_seconds
    assert client.under_way.wait(PATIENCE)
    leader.release()
    assert holder(client, calm) == ""


@pytest.mark.full
def test_a_surprise_costs_a_try_and_no_election(faulty: Faulty, settings: OperatorSettings):
    """A standby goes on trying after an error that nobody foresaw."""
    faulty.broken = True
    leader = Leader(faulty, settings, lost=lambda: None)
    leader.start()
    time.sleep(0.4)
    assert leader.alive()
    faulty.broken = False
    assert leader.acquired.wait(PATIENCE)
    leader.release()


@pytest.mark.full
def test_a_leader_that_only_gets_surprises_ends(faulty: Faulty, lasting: OperatorSettings):
    """It cannot renew, whatever the reason: it ends before another leads."""
    ended: list[float] = []
    leader = Leader(faulty, lasting, lost=lambda: ended.append(time.monotonic()))
    leader.start()
    assert leader.acquired.wait(PATIENCE)
    broke = time.monotonic()
    faulty.broken = True
    try:
        assert poll(lambda: ended) is not None
        assert ended[0] - broke < lasting.lease_seconds
    finally:
        faulty.broken = False
        leader.release()


@pytest.mark.full
def test_a_lease_that_is_deleted_makes_no_second_leader(
    cluster: Cluster, settings: OperatorSettings
):
    """Whoever leads ends at once, and nobody makes another before a leader must have ended."""
    settings = replace(settings, lease_seconds=4.0, renew_deadline=3.0)
    make_lease(cluster, settings)
    ended: list[float] = []
    first = Leader(cluster, settings, lost=lambda: ended.append(time.monotonic()))
    first.start()
    assert first.acquired.wait(PATIENCE)
    second = Leader(cluster, settings, lost=lambda: None)
    second.start()
    gone = time.monotonic()
    cluster.delete("Lease", settings.own_namespace, settings.lease_name)
    assert second.acquired.wait(PATIENCE)
    led = time.monotonic()
    second.release()
    assert ended
    assert ended[0] < led
    assert led - gone >= settings.lease_seconds


class Hanging(Cluster):
    """A client whose calls do not return once it hangs."""

    hangs = False

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        if self.hangs:
            threading.Event().wait()
        return super().get(kind, namespace, name)


@pytest.mark.full
def test_a_leader_whose_call_never_returns_ends(plane: ControlPlane, lasting: OperatorSettings):
    """The watchdog counts from when the last good renewal was begun, and waits for no call."""
    ended: list[float] = []
    client = Hanging(kubeconfig=plane.kubeconfig())
    leader = Leader(client, lasting, lost=lambda: ended.append(time.monotonic()))
    leader.start()
    assert leader.acquired.wait(PATIENCE)
    client.hangs, hung = True, time.monotonic()
    assert poll(lambda: ended) is not None
    assert ended[0] - hung < lasting.lease_seconds


STUCK = """
import ctypes, sys, time
from tandem.operator.loop.leader import Watchdog, end_process

dog = Watchdog(end_process, by_force_after=0.5)
dog.feed(time.monotonic() + 0.5)
ctypes.PyDLL(None).sleep(50)
sys.exit(7)
"""


def test_a_stuck_interpreter_ends_too():
    """A call that never gives the interpreter back is ended by force."""
    done = subprocess.run([sys.executable, "-c", STUCK], check=False, timeout=40)
    assert done.returncode == 1


def test_a_fed_watchdog_bites_nobody():
    """As long as it hears of renewals, and once it was told to stop, nothing ends."""
    ended: list[int] = []
    dog = Watchdog(lambda: ended.append(1), by_force_after=None)
    for _ in range(20):
        dog.feed(time.monotonic() + 30)
    with dog._changed:  # it looks when both were said, however slow the machine
        dog.feed(time.monotonic() + 0.05)
        dog.stop()
    dog.feed(time.monotonic() + 0.05)  # a renewal that was under way
    time.sleep(0.2)
    assert not ended


@pytest.mark.full
def test_nothing_is_written_once_the_lease_may_be_anothers(plane: ControlPlane, namespace: str):
    """A client behind the fence reads always, and writes only while the Lease surely holds."""
    fence = Fence()
    client = Cluster(kubeconfig=plane.kubeconfig(), fence=fence)
    thing = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "thing", "namespace": namespace},
    }
    for until in (float("-inf"), time.monotonic() - 1):
        fence.open_until(until)
        for write in (client.create, client.apply, client.replace):
            with pytest.raises(ClusterError, match="is no longer the leader"):
                write(thing)
        with pytest.raises(ClusterError, match="is no longer the leader"):
            client.delete("ConfigMap", namespace, "thing")
        assert client.get("ConfigMap", namespace, "thing") is None
    fence.open_until(time.monotonic() + 60)
    assert client.create(thing) is not None


@pytest.mark.full
def test_the_lease_is_kept_while_a_write_is_under_way(cluster: Cluster, calm: OperatorSettings):
    """A leader that ends gives the Lease back only when nothing of its own can land any more."""
    fence = Fence()
    leader = Leader(cluster, calm, fence=fence, lost=lambda: None)
    leader.start()
    assert leader.acquired.wait(PATIENCE)
    with fence.writing() as seconds:
        assert 0 < seconds <= calm.renew_deadline
        leader.release()
        assert holder(cluster, calm) == leader.identity
    with pytest.raises(FencedOff), fence.writing():
        pass


@pytest.mark.full
def test_a_standby_is_alive_however_long_it_waits(cluster: Cluster, settings: OperatorSettings):
    """The age of the last list counts from when this replica began to list."""
    resync = Resync(cluster, Store(), settings, lambda _: None, OperatorMetrics())
    time.sleep(0.2)
    assert resync.age() == 0


def test_no_account_and_no_kubeconfig_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A process that cannot know its API server ends with a sentence."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ClusterError, match="neither a pod's account nor a kubeconfig"):
        Cluster(kubeconfig=tmp_path / "nothing")
