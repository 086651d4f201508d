"""Fixtures: the cluster, namespaces under the restricted profile, the installed operator.

Nothing here runs unless the suite was asked for (`make e2e`): without it every test is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e_cluster import setup as setups
from tests.e2e_cluster.install import Installed, install
from tests.e2e_cluster.kube import Kube
from tests.e2e_cluster.service import Service, prepare_namespace
from tests.e2e_cluster.setup import Setup
from tests.e2e_cluster.volumes import remove_volumes

RESTRICTED = {
    f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "audit", "warn")
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is timed comes first, while no other test's pods are about to go."""
    items.sort(key=lambda item: item.path.name != "test_first_token.py")


@pytest.fixture(scope="session")
def setup() -> Setup:
    """The cluster that the suite was given."""
    found = setups.read()
    if found is None:
        pytest.skip("runs by `make e2e`")
    return found


@pytest.fixture
def own_cluster(setup: Setup) -> None:
    """The cluster's machines may be killed."""
    if not setup.is_own:
        pytest.skip("kills nodes: only on the cluster of tests/cluster")


@pytest.fixture(scope="session")
def cluster(setup: Setup) -> Kube:
    """The cluster, its namespace ``default``."""
    return Kube(setup.kubeconfig)


@pytest.fixture(scope="module")
def kube(cluster: Kube, setup: Setup, request: pytest.FixtureRequest) -> Iterator[Kube]:
    """A namespace of the module's own, under the restricted profile; gone afterwards."""
    module = request.module.__name__.rpartition(".")[2].removeprefix("test_").replace("_", "-")
    name = f"e2e-{module}"[:40]
    cluster.delete("namespace", name, seconds=180)
    metadata = {"name": name, "labels": RESTRICTED}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    kube = cluster.within(name)
    prepare_namespace(kube, setup)
    try:
        yield kube
    finally:
        cluster.delete("namespace", name, "--wait=false")
        remove_volumes(kube)


@pytest.fixture(scope="session")
def operator(cluster: Kube, setup: Setup) -> Installed:
    """The operator, installed from the chart with two replicas; both are up."""
    return install(cluster)


@pytest.fixture(scope="module", autouse=True)
def restarts_before(operator: Installed) -> int:
    """How often the operators' containers had ended when the module began."""
    return operator.restarts()


@pytest.fixture(scope="module")
def service(kube: Kube, setup: Setup, operator: Installed) -> Iterator[Service]:
    """A served model of the module's own: one prefill, one decode worker, one router, NIXL."""
    served = Service(kube, setup, changes={"kvTransfer": {"connector": "NIXL"}})
    served.apply()
    served.wait_ready()
    yield served
    served.leave()
