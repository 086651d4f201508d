"""Where a process is told to listen on `::`, both families reach it; without IPv6, IPv4 does."""

from __future__ import annotations

import socket
import urllib.request

import pytest
import zmq
from prometheus_client import CollectorRegistry

from tandem.base.listening import ANY_4, ANY_6, bound_socket, has_ipv6, listening_host
from tandem.worker.io import _bound
from tandem.worker.probes import ProbeServer, ProbeState

IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
BOTH = [pytest.param("127.0.0.1"), pytest.param("[::1]", marks=IPV6)]


def health(host: str, port: int) -> int:
    with urllib.request.urlopen(f"http://{host}:{port}/health", timeout=5) as answer:
        return int(answer.status)


@pytest.fixture
def without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has none: its sockets are refused."""
    real = socket.socket

    def made(*arguments: object, **named: object) -> socket.socket:
        if socket.AF_INET6 in (*arguments, *named.values()):
            raise OSError("Address family not supported by protocol")
        return real(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("tandem.base.listening.socket.socket", made)


def probes(host: str) -> ProbeServer:
    state = ProbeState(
        health=lambda: None, ready=lambda: None, debug=dict, registry=CollectorRegistry()
    )
    server = ProbeServer(host, 0, state)
    server.start()
    return server


@pytest.mark.parametrize("host", BOTH)
@pytest.mark.parametrize("told", [ANY_6, "[::]"])
def test_probes_answer_both_families(told: str, host: str) -> None:
    """The kubelet asks at the pod's address, whichever that is."""
    server = probes(told)
    try:
        assert health(host, server.port) == 200
    finally:
        server.stop()


@pytest.mark.parametrize("host", BOTH)
def test_a_worker_takes_links_of_both_families(host: str) -> None:
    """Routers come to the pod's address."""
    router = _bound("tcp://:::*", None)
    port = router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IPV6, 1)
    try:
        dealer.connect(f"tcp://{host}:{port}")
        dealer.send(b"here")
        assert router.poll(5000)
        assert router.recv_multipart()[1] == b"here"
    finally:
        dealer.close(0)
        router.close(0)


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:"),
        pytest.param("tcp://::1:*", "tcp://[::1]:", marks=IPV6),
        pytest.param("tcp://[::1]:*", "tcp://[::1]:", marks=IPV6),
    ],
)
def test_an_address_is_bound_as_it_is_given(endpoint: str, bound: str) -> None:
    router = _bound(endpoint, None)
    found = router.getsockopt_string(zmq.LAST_ENDPOINT)
    router.close(0)
    assert found.startswith(bound)


@pytest.mark.usefixtures("without_ipv6")
def test_without_ipv6_all_listen_on_ipv4() -> None:
    """Nothing fails where nodes have none."""
    assert listening_host(ANY_6) == ANY_4
    listener = bound_socket(ANY_6, 0)
    assert listener.getsockname()[0] == ANY_4
    listener.close()
    server = probes(ANY_6)
    assert health("127.0.0.1", server.port) == 200
    server.stop()
    router = _bound("tcp://:::*", None)
    found = router.getsockopt_string(zmq.LAST_ENDPOINT)
    router.close(0)
    assert found.startswith("tcp://0.0.0.0:")


def test_a_port_that_is_taken_is_an_error() -> None:
    with bound_socket("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(OSError, match="in use"):
            bound_socket("127.0.0.1", first.getsockname()[1])
