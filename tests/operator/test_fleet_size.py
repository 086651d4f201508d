"""What many services cost the API server: counted, on a real one."""

from __future__ import annotations

import json
import re
import ssl
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tests.operator.builders import service
from tests.operator.control_plane import TOKEN, ControlPlane, control_plane, missing
from tests.operator.harness import OPERATOR_NAMESPACE, Harness, OperatorProcess, Operators, poll
from tests.operator.node import FakeRouter, Node
from tests.operator.prepared import apply_crds
from tests.operator.proxy import Proxy
from tests.operator.test_model_jobs import held

from tandem.operator.cluster import Cluster
from tandem.operator.cluster.client import KINDS as PATHS
from tandem.operator.cluster.store import KINDS, SERVICE
from tandem.operator.loop.resync import PAGE

FEW, MANY = 8, 1000
RESYNC = 1
ROUNDS = 3
_LEASE = "/leases/"

CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "models"},
    "spec": {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Gi"}}},
}

pytestmark = [pytest.mark.slow]


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_a_look_at_an_unchanged_service_asks_for_nothing(
    plane: ControlPlane, cluster: Cluster, namespace: str, node: Node, router: FakeRouter
):
    """However often services are looked at: a list a kind and round, watches, and the Lease."""
    harness = Harness(plane, cluster, namespace)
    harness.kubectl("apply", "-f", "manifests/operator/lease.yaml")
    with Proxy(plane) as proxy:
        flags = [f"--namespaces={namespace}"]
        where = (plane.home, f"{namespace}-few", proxy.kubeconfig())
        operator = OperatorProcess(
            *where, *flags, namespace=namespace, resync_seconds=RESYNC, canary_seconds=1
        )
        try:
            for number in range(FEW):
                harness.create(f"demo{number}")
            for number in range(FEW):
                harness.ready(f"demo{number}", seconds=120)
                harness.wait(partial(is_quiet, harness, f"demo{number}"), 90)
            during_rounds(proxy)  # what the last change entailed
            asked = during_rounds(proxy)
        finally:
            operator.stop()
    lists = Counter(each for each in asked if is_list(each))
    assert max(lists.values()) <= 2 * ROUNDS < FEW * ROUNDS, lists
    rest = [each for each in asked if not is_list(each) and _LEASE not in each]
    assert {each.split()[0] for each in rest} <= {"WATCH"}, rest


def is_quiet(harness: Harness, name: str) -> bool:
    """Whether nothing is to be written to the service's status any more."""
    links = harness.condition("KVFabricReady", name)[1]
    return (links, harness.condition("Progressing", name)[1]) == ("LinksUp", "Stable")


def is_list(request: str) -> bool:
    """Whether a request lists one of the kinds that are looked at."""
    method, path = request.split()
    return method == "GET" and path.rpartition("/")[2] in {PATHS[kind][1] for kind in KINDS}


def during_rounds(proxy: Proxy) -> list[str]:
    """What was asked while services were listed so many times."""
    begin = len(proxy.requests)

    def rounds() -> int:
        seen = proxy.requests[begin:]
        return sum(is_list(each) and each.endswith("/llmservices") for each in seen)

    assert poll(lambda: rounds() > ROUNDS, 60) is not None
    return proxy.requests[begin:]


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_as_many_jobs_as_allowed_run_at_a_time(lone: Harness, operators: Operators, node: Node):
    """The others say that they are queued, and get their turn."""
    node.rules.append(held)
    try:
        operators.start("few", model_jobs=2, workers=1)
        for number in range(FEW):
            lone.create(f"demo{number}")

        def reasons() -> list[str]:
            every = (lone.condition("ModelReady", f"demo{number}") for number in range(FEW))
            return sorted(reason for _, reason, _ in every)

        wanted = ["Checking"] * 2 + ["Queued"] * (FEW - 2)
        lone.wait_for(lambda: reasons() == wanted, 40)
        assert len(lone.names("Job")) == 2
    finally:
        node.rules.clear()
    for number in range(FEW):
        lone.ready(f"demo{number}", seconds=60)


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[ControlPlane]:
    """An API server that nobody else asks, without controllers."""
    if missing():
        pytest.skip("no API server")
    with control_plane(tmp_path) as running:
        apply_crds(running)
        running.kubectl("create", "namespace", OPERATOR_NAMESPACE)
        yield running


def calls(plane: ControlPlane) -> Counter[str]:
    """Requests for kinds that are looked at, as the API server counts them, by verb."""
    url, headers = plane.server + "/metrics", {"Authorization": f"Bearer {TOKEN}"}
    context = ssl._create_unverified_context()
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, context=context, timeout=30) as answer:
        text = answer.read().decode()
    found: Counter[str] = Counter()
    wanted = {PATHS[kind][1] for kind in KINDS} | {"events", "persistentvolumeclaims"}
    for line in re.findall(r"^apiserver_request_total\{.*$", text, re.MULTILINE):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
        if labels["resource"] in wanted:
            found[labels["verb"]] += int(float(line.rpartition(" ")[2]))
    return found


def fill(plane: ControlPlane) -> None:
    """A thousand suspended services in ten namespaces."""
    spaces = [f"team-{number}" for number in range(10)]
    cluster = Cluster(kubeconfig=plane.kubeconfig())
    for name in spaces:
        plane.kubectl("create", "namespace", name)
        plane.kubectl("-n", name, "create", "-f", "-", stdin=json.dumps(CLAIM))

    def make(number: int) -> None:
        made = service(f"demo{number}", suspend=True)
        made["metadata"]["namespace"] = spaces[number % len(spaces)]
        cluster.create(made)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(MANY)))


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_thousand_services_cost_a_few_calls_a_second(apart: ControlPlane):
    """In a minute: one list a kind in pages, watches, claims that are named; the API server
    counts."""
    fill(apart)
    apart.kubectl("-n", OPERATOR_NAMESPACE, "apply", "-f", "manifests/operator/lease.yaml")
    cluster = Cluster(kubeconfig=apart.kubeconfig())
    operator = OperatorProcess(
        apart.home, "many", apart.kubeconfig(), lease_seconds=60, renew_deadline=40
    )
    try:

        def told() -> bool:
            found = cluster.items(SERVICE, None)
            return all(each.get("status", {}).get("conditions") for each in found)

        assert poll(told, 1500) is not None, operator.log()[-3000:]
        assert poll(lambda: not writes(spent_in(apart, 10.0)), 300) is not None
        spent = spent_in(apart, 60.0)
    finally:
        operator.stop()
    counts = {kind: len(cluster.items(kind, None)) for kind in KINDS}
    print(json.dumps(spent), json.dumps(counts))
    pages = sum(-(-count // PAGE) or 1 for count in counts.values())
    assert spent["LIST"] <= 2 * pages, spent
    assert not writes(spent), spent
    assert sum(spent.values()) < 8 * 60, spent


def spent_in(plane: ControlPlane, seconds: float) -> Counter[str]:
    before = calls(plane)
    time.sleep(seconds)
    return calls(plane) - before


def writes(spent: Counter[str]) -> int:
    return sum(count for verb, count in spent.items() if verb not in ("GET", "LIST", "WATCH"))
