"""One API server, one operator and one stand-in for nodes for all tests of this folder; each test
gets a namespace of its own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.operator.control_plane import (
    OPERATOR_TOKEN,
    ControlPlane,
    control_plane,
    missing,
    start_controllers,
)
from tests.operator.harness import OPERATOR_NAMESPACE, Harness, OperatorProcess, Operators
from tests.operator.node import FakeRouter, Node
from tests.operator.silent import Silent

from tandem.operator.cluster import Cluster

_CONTROLLERS = (
    "deployment-controller",
    "replicaset-controller",
    "garbage-collector-controller",
    "job-controller",
)
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
    with control_plane(home) as running:
        running.kubectl("apply", "--server-side", "-k", "manifests/crds")
        running.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        start_controllers(running, _CONTROLLERS)
        running.kubectl("create", "namespace", OPERATOR_NAMESPACE)
        _grant(running)
        yield running


def _grant(plane: ControlPlane) -> None:
    """The operator's own rights and what its writes are held to, for the user whose token the
    operator gets here."""
    for each in ("rbac", "lease"):
        plane.kubectl("-n", OPERATOR_NAMESPACE, "apply", "-f", f"manifests/operator/{each}.yaml")
    policy = Path("manifests/operator/admission.yaml").read_text()
    account = f"system:serviceaccount:{OPERATOR_NAMESPACE}:tandem-operator"
    assert account in policy
    plane.kubectl("apply", "-f", "-", stdin=policy.replace(account, "operator"))
    user = "--user=operator"
    plane.kubectl("create", "clusterrolebinding", "operator", "--clusterrole=tandem-operator", user)
    plane.kubectl(
        "-n",
        OPERATOR_NAMESPACE,
        "create",
        "rolebinding",
        "operator",
        "--role=tandem-operator-lease",
        user,
    )


@pytest.fixture(scope="session")
def cluster(plane: ControlPlane) -> Cluster:
    """A client of the administrator."""
    return Cluster(kubeconfig=plane.kubeconfig())


@pytest.fixture(scope="session")
def node(cluster: Cluster) -> Iterator[Node]:
    """Makes pods ready."""
    running = Node(cluster)
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def router() -> Iterator[FakeRouter]:
    """Answers canaries."""
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
    plane.kubectl("create", "namespace", name)
    plane.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models"},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    plane.kubectl("-n", name, "create", "-f", "-", stdin=json.dumps(claim))
    return name


@pytest.fixture
def lone(
    plane: ControlPlane, cluster: Cluster, namespace: str, node: Node, router: FakeRouter
) -> Harness:
    """A namespace without the operator that other tests share; pods become ready in it."""
    return Harness(plane, cluster, namespace)


@pytest.fixture
def silent() -> Iterator[Silent]:
    """Nobody answers at its address."""
    made = Silent()
    yield made
    made.wake()


@pytest.fixture
def operators(plane: ControlPlane, namespace: str) -> Iterator[Operators]:
    """Starts replicas."""
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
    plane.kubectl("-n", namespace, "delete", "llm", "--all", "--wait=false")
