"""Deleting a service leaves nothing, with and without an operator; uninstalling leaves the CRDs."""

from __future__ import annotations

import pytest
from tests.e2e_cluster.install import Installed
from tests.e2e_cluster.kube import wait_for
from tests.e2e_cluster.service import KIND, Service

pytestmark = [
    *(pytest.mark.cluster, pytest.mark.timeout(300)),
    pytest.mark.usefixtures("never_fits"),  # its minute of waiting goes by meanwhile
]

KINDS = (
    "all,configmaps,secrets,serviceaccounts,networkpolicies,poddisruptionbudgets,roles,"
    "rolebindings,controllerrevisions,llmservices,llmrolescalers"
)


def left(service: Service) -> list[str]:
    return [
        f"{each['kind']} {each['metadata']['name']} {each['metadata'].get('finalizers', '')}"
        for each in service.kube.items(KINDS, service.selector)
    ]


def assert_nothing_is_left(service: Service) -> None:
    """All children go by themselves, without anybody's finalizer."""
    wait_for("all children to go", lambda: not left(service), seconds=180)


def test_deletion_leaves_nothing(short_lived: list[Service]) -> None:
    """A serving resource is deleted: no child and no finalizer is left."""
    served = short_lived[0]
    assert not served.wait_ready()["metadata"].get("finalizers")
    served.kube.delete(KIND, served.name, seconds=30)
    assert_nothing_is_left(served)


def test_deletion_needs_no_operator(short_lived: list[Service], operator: Installed) -> None:
    """With the operator away the resource and all children go as well."""
    served = short_lived[1]
    served.wait_ready()
    operator.kube.run("scale", "deployment", "tandem", "--replicas=0")
    try:
        wait_for("operators to go", lambda: not operator.pods(), seconds=60)
        served.kube.delete(KIND, served.name, seconds=30)
        assert_nothing_is_left(served)
    finally:
        operator.kube.run("scale", "deployment", "tandem", "--replicas=2")
        operator.kube.run("rollout", "status", "deployment", "tandem", "--timeout=60s", seconds=70)
