"""A node's power is cut under load: only requests that a router on it had may break, by number."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest
from tests.cluster import lifecycle
from tests.e2e_cluster import pods
from tests.e2e_cluster.breaks import Breaks
from tests.e2e_cluster.entry import Entry, Forgetting
from tests.e2e_cluster.install import Installed
from tests.e2e_cluster.kube import Json, Kube, conditions, wait_for
from tests.e2e_cluster.load import CONNECT_EVERY, STREAMS, Load
from tests.e2e_cluster.service import Service
from tests.e2e_cluster.shared import turn
from tests.e2e_cluster.test_under_load import last_node

from tandem.operator.probes.reach import REASON

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("own_cluster"),
]

RECOVERY_SECONDS = 240.0
ENTRY = "node1"
"""The suite comes in through the first node, and ends the last."""


@pytest.fixture(scope="module")
def service(two_of_each: Service, request: pytest.FixtureRequest) -> Iterator[Service]:
    """Two of each role, spread over both nodes."""
    yield from turn(two_of_each, "two_of_each", request)


@pytest.fixture(scope="module")
def kube(service: Service) -> Kube:
    return service.kube


def one_on(service: Service, role: str, node: str) -> Json:
    """The one of a role's two pods that is on a node. Where the last test left both on one node, as
    a drain does, one is deleted: the scheduler prefers the other node for what takes its place."""

    def found() -> Json | None:
        both = service.wait_pods(role, 2)
        there = [pod for pod in both if pods.node_of(pod) == node]
        if len(there) == 1:
            return there[0]
        service.kube.delete("pod", pods.name_of(both[0]), "--wait=false")
        return None

    one: Json = wait_for(f"one {role} pod on {node}", found, seconds=240, every=2.0)
    return one


def elsewhere(service: Service, node: str) -> bool:
    """Whether two of each role are ready on other nodes: the dead ones look ready for a while."""
    for role in ("prefill", "decode", "router"):
        ready = [pod for pod in service.pods(role) if pods.is_ready(pod)]
        if sum(pods.node_of(pod) != node for pod in ready) < 2:
            return False
    return True


def lead_from_elsewhere(operator: Installed, node: str) -> None:
    """Have an operator lead that does not die with the node: another would have to wait for the
    Lease first, and here the node's own taint comes sooner."""

    def leads_elsewhere() -> bool:
        leader = operator.kube.find("pod", operator.holder() or "none")
        if leader is not None and pods.node_of(leader) == node:
            operator.kube.delete("pod", pods.name_of(leader), "--wait=false")
        return leader is not None and pods.node_of(leader) != node

    wait_for("a leader on another node", leads_elsewhere, seconds=120, every=2.0)


def test_a_node_dies(
    service: Service, operator: Installed, kube: Kube, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node falls silent: requests with its router break and no others, new connections miss
    until the Service has forgotten that router, and the service is whole again."""
    node = last_node(kube)
    lead_from_elsewhere(operator, node)
    gone, *_ = [one_on(service, role, node) for role in ("router", "prefill", "decode")]
    dead = {str(gone["status"]["podIP"])}
    entry = Entry(ENTRY)
    try:
        with Load(service.url()) as load:
            load.wait_served(4, 240)
            cut = time.monotonic()
            lifecycle.kill_node(node)
            with Forgetting(entry, dead) as forgetting:
                went = entry.destinations()
                load.wait_served(1, 60)
                first = time.monotonic() - cut
                wait_for("the Service to forget", lambda: forgetting.moment, seconds=90)
                lost = conditions(kube.get("pod", pods.name_of(gone)))["Ready"]
                whole_again = partial(elsewhere, service, node)
                wait_for("all pods on other nodes", whole_again, seconds=RECOVERY_SECONDS)
            whole = time.monotonic() - cut
            load.wait_served(4, 240)
        forgotten = forgetting.moment
        assert forgotten is not None, "the dead router is named still"
        breaks = Breaks.of(load.attempts, went, dead, cut=cut)
        most = breaks.most_unconnected(STREAMS, forgotten=forgotten, every=CONNECT_EVERY)
        with capsys.disabled():
            print(f"\nnext answer after {first:.1f} s, forgotten after {forgotten - cut:.1f} s,")
            print(f"all pods back after {whole:.1f} s; {breaks}, at most {most} might")
            print(f"{load.tally}; the dead router: {lost}")
        assert (lost["status"], lost.get("reason")) == ("False", REASON), "told by the operator"
        load.assert_right()
        assert not breaks.elsewhere, breaks.elsewhere
        assert len(breaks.broken) <= len(breaks.begun) <= STREAMS
        assert len(load.tally.failures) == len(breaks.broken)
        assert not breaks.late(forgotten), breaks.late(forgotten)
        assert len(breaks.unconnected) <= most
    finally:
        lifecycle.revive_node(node)


def test_the_node_comes_back(service: Service, kube: Kube) -> None:
    """After the node's return nothing is left over, and the service is Ready."""
    service.wait_ready(240)
    for role in ("prefill", "decode", "router"):
        service.wait_pods(role, 2, 120)
    assert "Paris" in service.ask()
