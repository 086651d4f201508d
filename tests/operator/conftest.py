"""One API server for all tests of this folder; each test gets a namespace of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from tests.operator.control_plane import ControlPlane, control_plane, missing

_CONTROLLERS = ("deployment-controller", "replicaset-controller", "garbage-collector-controller")
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server with Tandem's CRDs; skips where its binaries are not there."""
    absent = missing()
    if absent:
        pytest.skip(f"no API server: {', '.join(absent)} not in TANDEM_KUBE_BIN or PATH")
    home = tmp_path_factory.mktemp("plane")
    with control_plane(home, controllers=_CONTROLLERS) as running:
        running.kubectl("apply", "--server-side", "-f", "manifests/crds")
        running.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        yield running


@pytest.fixture
def namespace(plane: ControlPlane) -> str:
    """A namespace that nobody else uses, with the restricted profile enforced."""
    name = f"test-{next(_numbers)}"
    plane.kubectl("create", "namespace", name)
    plane.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    return name
