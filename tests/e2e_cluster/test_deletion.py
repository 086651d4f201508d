"""Deleting a service leaves nothing, with and without an operator; uninstalling leaves the CRDs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e_cluster.install import Installed
from tests.e2e_cluster.kube import Kube, wait_for
from tests.e2e_cluster.service import KIND, Service
from tests.e2e_cluster.setup import Setup

pytestmark = [
    *(pytest.mark.cluster, pytest.mark.timeout(300)),
    pytest.mark.usefixtures("never_fits"),  # its minute of waiting goes by meanwhile
]

KINDS = (
    "all,configmaps,secrets,serviceaccounts,networkpolicies,poddisruptionbudgets,roles,"
    "rolebindings,controllerrevisions,llmservices,llmrolescalers"
)


def left(service: Service) -> list[str]:
    """Children that are still there."""
    return [
        f"{each['kind']} {each['metadata']['name']} {each['metadata'].get('finalizers', '')}"
        for each in service.kube.items(KINDS, service.selector)
    ]


def assert_nothing_is_left(service: Service) -> None:
    """All children go by themselves, without anybody's finalizer."""
    wait_for("all children to go", lambda: not left(service), seconds=180)


@pytest.fixture(scope="module")
def services(kube: Kube, setup: Setup, operator: Installed) -> Iterator[list[Service]]:
    """One for each test, Ready: raised at once, since most of the time goes by in waiting."""
    made = [Service(kube, setup, name) for name in ("first", "second")]
    for served in made:
        served.apply()
    for served in made:
        served.wait_ready()
    yield made
    for served in made:
        served.leave()


def test_deletion_leaves_nothing(kube: Kube, services: list[Service]) -> None:
    """A serving resource is deleted: no child and no finalizer is left."""
    served = services[0]
    assert not served.get()["metadata"].get("finalizers")
    kube.delete(KIND, served.name, seconds=30)
    assert_nothing_is_left(served)


def test_deletion_needs_no_operator(
    kube: Kube, services: list[Service], operator: Installed
) -> None:
    """With the operator away the resource and all children go as well."""
    served = services[1]
    assert served.wait_ready()
    operator.kube.run("scale", "deployment", "tandem", "--replicas=0")
    try:
        wait_for("operators to go", lambda: not operator.pods(), seconds=60)
        kube.delete(KIND, served.name, seconds=30)
        assert_nothing_is_left(served)
    finally:
        operator.kube.run("scale", "deployment", "tandem", "--replicas=2")
        operator.kube.run("rollout", "status", "deployment", "tandem", "--timeout=60s", seconds=70)
