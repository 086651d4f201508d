"""Fixtures: the cluster, namespaces under the restricted profile, the installed operator.

Nothing here runs unless the suite was asked for (`make e2e`): without it every test is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e_cluster import setup as setups
from tests.e2e_cluster.install import Installed, install
from tests.e2e_cluster.kube import Kube
from tests.e2e_cluster.service import Service
from tests.e2e_cluster.setup import Setup
from tests.e2e_cluster.shared import NEVER_FITS, ONE_EACH, PULLING, namespace, turn, two_each

ORDER = (
    *("first_token", "apis", "isolation", "operator_life", "repair"),  # share one service
    *("under_load", "node_death"),  # and these another
    *("line", "same_node"),
    *("pulls", "deletion"),  # and the last two
    *("boundaries", "bad_resources", "documents", "upgrade"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is timed comes first, while no other test's pods are about to go; then those that share
    a service, one after the other. Documents and upgrades uninstall everything, and come last."""
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        """Tests of other folders are among the items: they keep their order, and come before."""
        is_ours = item.path.parent == here
        return ORDER.index(item.path.stem.removeprefix("test_")) if is_ours else -1

    items.sort(key=place)


@pytest.fixture(scope="session")
def setup() -> Setup:
    """The cluster that the suite was given."""
    found = setups.read()
    if found is None:
        pytest.skip("runs by `make e2e`")
    return found


@pytest.fixture
def own_cluster(setup: Setup) -> None:
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
    with namespace(cluster, setup, f"e2e-{module}"[:40]) as kube:
        yield kube


@pytest.fixture(scope="session")
def operator(cluster: Kube, setup: Setup) -> Installed:
    """The operator, installed from the chart with two replicas; both are up."""
    return install(cluster)


@pytest.fixture(scope="module", autouse=True)
def restarts_before(operator: Installed) -> int:
    """How often the operators' containers had ended when the module began."""
    return operator.restarts()


@pytest.fixture(scope="session")
def one_each(cluster: Kube, setup: Setup, operator: Installed) -> Iterator[Service]:
    """A served model that modules share: one prefill, one decode worker, one router, NIXL."""
    with namespace(cluster, setup, "e2e-one-each") as kube:
        served = Service(kube, setup, changes=ONE_EACH)
        served.apply()
        yield served


@pytest.fixture(scope="session")
def two_of_each(cluster: Kube, setup: Setup, operator: Installed) -> Iterator[Service]:
    """Another one: two workers of each kind, and two routers on different nodes."""
    with namespace(cluster, setup, "e2e-two-each") as kube:
        served = Service(kube, setup, changes=two_each())
        served.apply()
        yield served


@pytest.fixture(scope="session")
def short_lived(cluster: Kube, setup: Setup, operator: Installed) -> Iterator[list[Service]]:
    """One whose decode workers pull from each other, and the sample: raised at once, since most of
    the time goes by in waiting, and deleted by the tests that come last."""
    with namespace(cluster, setup, "e2e-short-lived") as kube:
        made = [Service(kube, setup, changes=PULLING), Service(kube, setup, "second")]
        for served in made:
            served.apply()
        yield made


@pytest.fixture(scope="session")
def never_fits(cluster: Kube, setup: Setup, operator: Installed) -> Iterator[Service]:
    """A service that no node has room for. The operator is patient with it for a minute, which
    tests of other things need not wait for: whoever asks for it first begins that minute."""
    with namespace(cluster, setup, "e2e-never-fits") as kube:
        served = Service(kube, setup, "never-fits", NEVER_FITS)
        served.apply()
        yield served


@pytest.fixture(scope="module")
def service(one_each: Service, request: pytest.FixtureRequest) -> Iterator[Service]:
    """The shared service, Ready. A module may hurt it, and leaves it Ready."""
    yield from turn(one_each, "one_each", request)
