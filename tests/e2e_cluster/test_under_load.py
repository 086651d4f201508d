"""Scaling, restarts and drains under four streams: no request fails, no token is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from tests.e2e_cluster import pods
from tests.e2e_cluster.access import node_address
from tests.e2e_cluster.faults import kill_container
from tests.e2e_cluster.kube import Kube, wait_for
from tests.e2e_cluster.load import Load
from tests.e2e_cluster.service import Service
from tests.e2e_cluster.setup import Setup
from tests.e2e_cluster.shared import turn

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROLES = ("prefill", "decode", "router")
BEFORE, AFTER = 4, 4
"""Answers that must come before and after what is done to the cluster."""
ANSWER_SECONDS = 240.0


@pytest.fixture(scope="module")
def service(two_of_each: Service, request: pytest.FixtureRequest) -> Iterator[Service]:
    """Two workers of each kind and two routers."""
    yield from turn(two_of_each, "two_of_each", request)


@pytest.fixture
def under_load(
    service: Service, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> Callable[[Callable[[], object]], None]:
    """``under_load(action)``: streams before, during and after; all of it is clean."""

    def perform(action: Callable[[], object]) -> None:
        with Load(service.url()) as load:
            load.wait_served(BEFORE, ANSWER_SECONDS)
            action()
            load.wait_served(AFTER, ANSWER_SECONDS)
        with capsys.disabled():
            print(f"\n{request.node.name}: {load.tally}")
        load.assert_clean()

    return perform


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_scaling_up_and_down(
    service: Service, under_load: Callable[[Callable[[], object]], None], role: str
) -> None:
    """A third worker comes and goes."""

    def scale() -> None:
        service.patch(**{role: {"replicas": 3}})
        service.wait_pods(role, 3, 180)
        service.patch(**{role: {"replicas": 2}})
        service.wait_pods(role, 2, 180)

    under_load(scale)


@pytest.mark.parametrize(
    "role",
    [pytest.param(each, marks=[] if each == "decode" else pytest.mark.nightly) for each in ROLES],
)
def test_a_rolling_restart(
    service: Service, under_load: Callable[[Callable[[], object]], None], role: str
) -> None:
    """`kubectl rollout restart` of a role's Deployment replaces every pod of it."""
    before = {pod["metadata"]["uid"] for pod in service.pods(role)}

    def restarted() -> bool:
        now = service.pods(role)
        fresh = [pod for pod in now if pod["metadata"]["uid"] not in before]
        return len(fresh) == len(now) == 2 and all(map(pods.is_ready, now))

    def restart() -> None:
        chosen = f"{service.selector},app.kubernetes.io/component={role}"
        service.kube.run("rollout", "restart", "deployment", "-l", chosen)
        wait_for(f"new {role} pods", restarted, seconds=400)

    under_load(restart)


@pytest.mark.parametrize(
    "grace",
    [None, pytest.param(20, marks=pytest.mark.nightly)],
    ids=["usual grace", "grace 20 s"],
)
def test_draining_a_node(
    service: Service,
    under_load: Callable[[Callable[[], object]], None],
    grace: int | None,
) -> None:
    """`kubectl drain` empties a node, and the pods go on on the other one."""
    node, kube = last_node(service.kube), service.kube
    more = [] if grace is None else [f"--grace-period={grace}"]

    def drain() -> None:
        try:
            kube.run(
                *("drain", node, "--ignore-daemonsets", "--delete-emptydir-data"),
                *("--timeout=400s", f"--pod-selector={service.selector}", *more),
                seconds=410,
            )
            for role in ROLES:
                service.wait_pods(role, 2, 240)
        finally:
            kube.run("uncordon", node)

    under_load(drain)


@pytest.mark.nightly
def test_a_scale_down_races_with_a_restart(
    service: Service, setup: Setup, under_load: Callable[[Callable[[], object]], None]
) -> None:
    """A decode worker's process is killed while the role shrinks: the other one takes all over."""

    def race() -> None:
        service.patch(decode={"replicas": 3})
        victim = service.wait_pods("decode", 3, 180)[0]
        shrink = threading.Thread(target=lambda: service.patch(decode={"replicas": 2}))
        shrink.start()
        kill_container(service.kube, setup, victim)
        shrink.join(60)
        service.wait_pods("decode", 2, 240)

    under_load(race)


def last_node(kube: Kube) -> str:
    """A node other than the one through which the suite comes in."""
    spared = node_address(kube)
    others = [
        node
        for node in kube.items("nodes")
        if spared not in [each["address"] for each in node["status"]["addresses"]]
    ]
    assert others, "needs two nodes"
    return pods.name_of(others[-1])


@pytest.mark.nightly
def test_a_suspended_service_comes_back(service: Service) -> None:
    """suspend takes all pods away, and its end brings them back; without load: it is an outage."""
    service.patch(suspend=True)
    for role in ROLES:
        service.wait_pods(role, 0, 240)
    service.patch(suspend=False)
    service.wait_ready(240)
    assert "Paris" in service.ask()
