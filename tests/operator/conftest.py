"""One API server, one operator and one stand-in for nodes for all tests of this folder; each test
gets a namespace of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.operator.control_plane import OPERATOR_TOKEN, ControlPlane, missing
from tests.operator.harness import Harness, OperatorProcess, Operators, services
from tests.operator.in_memory import Demo
from tests.operator.node import FakeRouter, Node
from tests.operator.prepared import make_namespace, prepared
from tests.operator.silent import Silent

from tandem.operator.cluster import Cluster

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server with Tandem's CRDs and the operator's rights; skips without binaries."""
    absent = missing()
    if absent:
        pytest.skip(
            f"no API server: {', '.join(absent)} not in TANDEM_KUBE_BIN, .cluster/bin or PATH"
        )
    home = tmp_path_factory.mktemp("plane")
    with prepared(home) as running:
        yield running


@pytest.fixture(scope="session")
def cluster(plane: ControlPlane) -> Cluster:
    return Cluster(kubeconfig=plane.kubeconfig())


@pytest.fixture(scope="session")
def node(cluster: Cluster) -> Iterator[Node]:
    running = Node(cluster)
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def router() -> Iterator[FakeRouter]:
    running = FakeRouter()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def operator(plane: ControlPlane, node: Node, router: FakeRouter) -> Iterator[OperatorProcess]:
    """One operator a module, with its own rights only: modules that start others have none."""
    config = plane.kubeconfig(token=OPERATOR_TOKEN)
    running = OperatorProcess(plane.home, "shared", config)
    yield running
    assert running.stop() == 0, running.log()[-3000:]


@pytest.fixture
def namespace(plane: ControlPlane) -> str:
    """A namespace that nobody else uses, with the restricted profile enforced."""
    name = f"test-{next(_numbers)}"
    make_namespace(plane, name)
    return name


@pytest.fixture
def lone(
    plane: ControlPlane, cluster: Cluster, namespace: str, node: Node, router: FakeRouter
) -> Harness:
    """A namespace without the operator that other tests share; pods become ready in it."""
    return Harness(plane, cluster, namespace)


@pytest.fixture
def silent() -> Iterator[Silent]:
    made = Silent()
    yield made
    made.wake()


@pytest.fixture
def operators(plane: ControlPlane, namespace: str) -> Iterator[Operators]:
    made = Operators(plane, namespace)
    yield made
    for process in made.running:
        if process.process.poll() is None:
            process.stop()


@pytest.fixture
def harness(
    plane: ControlPlane,
    cluster: Cluster,
    operator: OperatorProcess,
    namespace: str,
    node: Node,
    router: FakeRouter,
) -> Iterator[Harness]:
    """A namespace with an operator at work; rules of the node last as long as the test."""
    yield Harness(plane, cluster, namespace)
    node.rules.clear()
    router.shape, router.wrong, router.keys = "disaggregated", False, None
    router.spared = None
    router.refused = []
    plane.send("DELETE", services(namespace))


@pytest.fixture
def demo() -> Iterator[Callable[..., Demo]]:
    """Makes services in memory that serve; their operators end with the test."""
    made: list[Demo] = []

    def make(**changes: Any) -> Demo:
        made.append(Demo(**changes))
        made[-1].turn(6)
        assert made[-1].condition("Ready")[0] == "True"
        made[-1].cluster.writes.clear()
        return made[-1]

    yield make
    for each in made:
        each.close()
