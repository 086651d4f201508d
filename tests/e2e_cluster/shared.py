"""Services that several modules use one after the other: raised once, and gone after the last.

Raising one takes half a minute, and so does its end. A module finds it whole: after a failure of
any test it is made anew, so that one fault is told once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from tests.e2e_cluster.kube import Json, Kube
from tests.e2e_cluster.service import NAME, Service, prepare_namespace
from tests.e2e_cluster.setup import Setup
from tests.e2e_cluster.volumes import remove_volumes

from tandem.protocol.names import LABEL_COMPONENT, LABEL_INSTANCE

RESTRICTED = {
    f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "audit", "warn")
}
GRPC_PORT = 9000
ONE_EACH: Json = {
    "kvTransfer": {"connector": "NIXL"},
    "router": {
        "extraArgs": ["--strict-handoff"],
        "service": {"type": "NodePort", "grpcPort": GRPC_PORT},
    },
}
"""One prefill, one decode worker, one router; ports of the nodes for HTTP and gRPC."""
PULLING: Json = {
    "kvTransfer": {"connector": "NIXL", "pullPeers": 1},
    "disaggregation": {"mode": "Never"},
    "engine": {"maxNumSeqs": 1},
    "prefill": {"replicas": 0},
    "decode": {"replicas": 2},
    "router": {
        "extraArgs": ["--target-ttft-ms", "60000", "--target-itl-ms", "5000"],
    },
}
"""Two decode workers with a seat each, which pull cached prefixes from each other; no answer of
theirs is late, so that times of computing and of links alone decide."""
NEVER_FITS: Json = {"decode": {"resources": {"requests": {"cpu": "900", "memory": "1Gi"}}}}
"""No node has so many cores."""


@contextmanager
def namespace(cluster: Kube, setup: Setup, name: str) -> Iterator[Kube]:
    """A namespace under the restricted profile, with the claims of the suite's services."""
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


def two_each() -> Json:
    """Two of each role, routers on nodes of their own as far as there are so many."""
    labels = {LABEL_INSTANCE: NAME, LABEL_COMPONENT: "router"}
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    spread = {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
    router = {"podTemplate": {"spec": {"affinity": {"podAntiAffinity": spread}}}}
    return {
        "prefill": {"replicas": 2},
        "decode": {"replicas": 2},
        "router": {"replicas": 2, "maxStreamSeconds": 120, **router},
    }


def turn(served: Service, fixture: str, request: pytest.FixtureRequest) -> Iterator[Service]:
    """A module's turn with the service of a fixture of the session: Ready when it begins, and left
    by the last module whose tests ask for it."""
    if request.session.testsfailed:
        served.delete()
        served.apply()
    served.wait_stable()
    yield served
    if not is_asked_for_later(request.session.items, request.path, fixture):
        served.leave()


def is_asked_for_later(items: Sequence[pytest.Item], module: object, fixture: str) -> bool:
    """Whether a test behind the last one of a module asks for a fixture."""
    last = max(number for number, item in enumerate(items) if item.path == module)
    return any(fixture in getattr(item, "fixturenames", ()) for item in items[last + 1 :])
