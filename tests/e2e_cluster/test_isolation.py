"""Who may talk to whom, and who may do what: pod security, network policies, CURVE, RBAC."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from tests.e2e_cluster import pods
from tests.e2e_cluster.install import NAMESPACE, RELEASE, Installed
from tests.e2e_cluster.kube import Kube, KubeError, wait_for
from tests.e2e_cluster.service import NAME, Service
from tests.e2e_cluster.setup import Setup

from tandem.protocol import names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STRANGERS = "e2e-strangers"
REACH = (
    "import concurrent.futures, socket, sys\n"
    "def state(port):\n"
    "    try:\n"
    "        socket.create_connection((sys.argv[1], int(port)), 2).close(); return 'open'\n"
    "    except OSError:\n"
    "        return 'closed'\n"
    "ports = sys.argv[2:]\n"
    "with concurrent.futures.ThreadPoolExecutor(len(ports)) as pool:\n"
    "    for port, said in zip(ports, pool.map(state, ports)): print(port, said)\n"
)
"""All ports at once: each that is closed is silent for as long as one waits."""
PORTS = (
    names.WORKER_PORT,
    names.PROBE_PORT,
    names.CONTROL_PORT,
    *range(names.DATA_PORT, names.DATA_PORT + names.DATA_PORTS),
)
GREET = (
    "import sys, zmq\n"
    "context = zmq.Context()\n"
    "if sys.argv[1] == '127.0.0.1':\n"
    "    plain = context.socket(zmq.ROUTER)\n"
    "    plain.bind(f'tcp://127.0.0.1:{sys.argv[2]}')\n"
    "socket = context.socket(zmq.DEALER)\n"
    "socket.linger = 0\n"
    "monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)\n"
    "socket.connect(f'tcp://{sys.argv[1]}:{sys.argv[2]}')\n"
    "print('greeted' if monitor.poll(3000) else 'ignored')\n"
    "socket.disable_monitor()\n"
    "context.destroy(linger=0)\n"
)


@pytest.fixture(scope="module")
def kube(service: Service) -> Kube:
    return service.kube


@pytest.fixture(scope="module")
def stranger(cluster: Kube) -> Iterator[Kube]:
    """A pod called ``stranger`` in a namespace that has nothing to do with the service."""
    space = cluster.within(STRANGERS)
    cluster.delete("namespace", STRANGERS, seconds=120)
    metadata = {"name": STRANGERS}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    space.apply(pods.bystander("stranger"))
    space.run("wait", "--for=condition=Ready", "pod/stranger", "--timeout=60s", seconds=70)
    yield space
    cluster.delete("namespace", STRANGERS, "--wait=false")


def reached(kube: Kube, pod: str, address: str, *ports: int) -> set[int]:
    """Ports of an address to which a pod can connect; it says of each whether it can."""
    said = kube.execute(pod, "python3", "-c", REACH, address, *map(str, ports))
    states = {int(port): state for port, state in map(str.split, said.splitlines())}
    assert states.keys() == set(ports), said
    return {port for port, state in states.items() if state == "open"}


def fenced(kube: Kube, pod: str, address: str, *ports: int) -> bool:
    """Whether a pod can connect to none of an address's ports."""
    return not reached(kube, pod, address, *ports)


def test_a_stranger_reaches_no_port_of_a_worker(service: Service, stranger: Kube) -> None:
    """From another namespace neither ZMQ nor control nor KV nor metrics of a worker is reached."""
    for role in ("prefill", "decode"):
        (worker,) = service.pods(role)
        at = worker["status"]["podIP"]
        nothing = partial(fenced, stranger, "stranger", at, *PORTS)
        wait_for("the policies to bite", nothing, seconds=20)
        assert nothing(), "they let go again"


def test_a_neighbour_reaches_no_port_of_a_worker(service: Service) -> None:
    """Nor is any from a pod of the same namespace that is not the service's."""
    service.kube.apply(pods.bystander("neighbour"))
    ready = ("wait", "--for=condition=Ready", "pod/neighbour", "--timeout=60s")
    service.kube.run(*ready, seconds=70)
    (worker,) = service.pods("decode")
    assert not reached(service.kube, "neighbour", worker["status"]["podIP"], *PORTS)
    service.kube.delete("pod", "neighbour", "--wait=false")


def test_the_routers_port_is_open(service: Service, stranger: Kube) -> None:
    """Everybody may ask: that is what the service is for."""
    (router,) = service.pods("router")
    port = names.ROUTER_PORT
    assert reached(stranger, "stranger", router["status"]["podIP"], port) == {port}


def test_without_keys_a_worker_says_nothing(service: Service, kube: Kube) -> None:
    """A pod that the policies let through, but that has no key, gets no ZMQ handshake.

    The same greeting is answered by a socket without keys, in the pod itself.
    """
    labels = {
        names.LABEL_APP: "tandem",
        names.LABEL_INSTANCE: NAME,
        names.LABEL_COMPONENT: "router",
    }
    kube.apply(pods.bystander("impostor", labels))
    kube.run("wait", "--for=condition=Ready", "pod/impostor", "--timeout=60s", seconds=70)
    greet = partial(kube.execute, "impostor", "python3", "-c", GREET)
    try:
        assert greet("127.0.0.1", str(names.WORKER_PORT)).strip() == "greeted"
        for role in ("prefill", "decode"):
            (worker,) = service.pods(role)
            at, port = worker["status"]["podIP"], names.WORKER_PORT
            way = partial(reached, kube, "impostor", at, port)
            wait_for("the way to be open", way, seconds=20)
            assert greet(at, str(port)).strip() == "ignored"
    finally:
        kube.delete("pod", "impostor")


def test_workers_have_no_way_out(service: Service) -> None:
    """A worker reaches neither the API server nor the world."""
    (worker,) = service.pods("decode")
    api = service.kube.within("default").get("service", "kubernetes")["spec"]["clusterIP"]
    assert not reached(service.kube, pods.name_of(worker), api, 443)


def test_pods_pass_the_restricted_profile(service: Service, kube: Kube) -> None:
    """The namespace enforces it, and workers hold no token of the API server."""
    labels = kube.get("namespace", kube.namespace)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for role in ("prefill", "decode"):
        for pod in service.pods(role):
            assert pod["spec"]["automountServiceAccountToken"] is False
    with pytest.raises(KubeError, match="violates PodSecurity"):
        kube.apply(pods.bystander("root") | {"spec": {"containers": [{"name": "x", "image": "x"}]}})


def rights(kube: Kube, account: str, namespace: str) -> set[str]:
    """What an account may do in a namespace, as `kubectl auth can-i --list` tells it."""
    listed = kube.within(namespace).run("auth", "can-i", "--list", f"--as={account}")
    return {" ".join(line.split()) for line in listed.splitlines()[1:]}


def test_the_routers_rights(service: Service, kube: Kube, setup: Setup) -> None:
    """A router may read pods of its namespace; beyond that only what everybody may."""
    account = f"system:serviceaccount:{kube.namespace}:{NAME}-router"
    everybody = rights(kube, f"system:serviceaccount:{kube.namespace}:default", kube.namespace)
    assert rights(kube, account, kube.namespace) - everybody == {"pods [] [] [get list watch]"}
    assert rights(kube, account, "default") - everybody == set()


def test_the_operators_rights(operator: Installed, cluster: Kube) -> None:
    """No star anywhere, no node, no namespace, no secret changed, and nothing but tandem.dev's."""
    account = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
    everybody = rights(cluster, f"system:serviceaccount:{NAMESPACE}:default", "default")
    own = rights(cluster, account, "default") - everybody
    assert own, "the operator may do nothing"
    assert not [each for each in own if "*" in each]
    assert not [each for each in own if each.split()[0] in ("nodes", "namespaces")]
    secrets = [each for each in own if each.startswith("secrets ")]
    assert len(secrets) == 1
    assert "update" not in secrets[0]
    assert "patch" not in secrets[0]
