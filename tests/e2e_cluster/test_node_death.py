"""A node's power is cut under load: only streams of routers that died with it may break."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest
from tests.cluster import lifecycle
from tests.e2e_cluster import pods
from tests.e2e_cluster.install import Installed
from tests.e2e_cluster.kube import Kube, wait_for
from tests.e2e_cluster.load import STREAMS, Load
from tests.e2e_cluster.service import Service
from tests.e2e_cluster.setup import Setup
from tests.e2e_cluster.test_under_load import FULL, last_node

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600), pytest.mark.usefixtures("own_cluster")]

BROKEN = ("RemoteProtocolError", "ReadError", "ReadTimeout", "ConnectTimeout", "WriteError")
"""What a client sees of a router that is gone; an answer with an error is something else."""
RECOVERY_SECONDS = 120.0


@pytest.fixture(scope="module")
def service(kube: Kube, setup: Setup, operator: Installed) -> Iterator[Service]:
    """Two of each role, spread over both nodes."""
    served = Service(kube, setup, changes=FULL)
    served.apply()
    served.wait_ready()
    yield served
    served.leave()


def elsewhere(service: Service, node: str) -> bool:
    """Whether two of each role are ready on other nodes: the dead ones look ready for a while."""
    for role in ("prefill", "decode", "router"):
        ready = [pod for pod in service.pods(role) if pods.is_ready(pod)]
        if sum(pods.node_of(pod) != node for pod in ready) < 2:
            return False
    return True


def test_a_node_dies(service: Service, kube: Kube, capsys: pytest.CaptureFixture[str]) -> None:
    """kubelet and all pods of a node are gone at once; the service serves on, then is whole."""
    node = last_node(kube)
    routers_there = [pod for pod in service.pods("router") if pods.node_of(pod) == node]
    try:
        with Load(service.url()) as load:
            load.wait_served(8, 240)
            start = time.monotonic()
            lifecycle.kill_node(node)
            dead = time.monotonic()
            load.wait_served(1, 60)
            first = time.monotonic() - start
            whole_again = partial(elsewhere, service, node)
            wait_for("all pods on other nodes", whole_again, seconds=RECOVERY_SECONDS)
            whole = time.monotonic() - start
            load.wait_served(8, 240)
        with capsys.disabled():
            print(f"\ndead after {dead - start:.2f} s, next answer after {first:.1f} s,", end=" ")
            print(f"all pods back after {whole:.1f} s")
            print(load.tally)
        load.assert_right()
        failures = load.tally.failures
        strange = [str(each) for each in failures if not each.reason.startswith(BROKEN)]
        assert not strange, strange
        late = [str(each) for each in failures if each.sent > dead]
        assert not late, late
        # A stream whose request broke may meet the router once more while it dies.
        assert len(failures) <= (2 * STREAMS if routers_there else 0), load.tally
    finally:
        lifecycle.revive_node(node)


def test_the_node_comes_back(service: Service, kube: Kube) -> None:
    """After the node's return nothing is left over, and the service is Ready."""
    service.wait_ready(240)
    for role in ("prefill", "decode", "router"):
        service.wait_pods(role, 2, 120)
    assert "Paris" in service.ask()
