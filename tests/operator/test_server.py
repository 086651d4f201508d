"""Probes and metrics of the operator, and what its processes import."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from msgspec import structs
from tests.operator.test_children import facts

from tandem.base.listening import has_ipv6
from tandem.operator.desired.naming import Role
from tandem.operator.desired.workload import rendered
from tandem.operator.metrics import OperatorMetrics
from tandem.operator.run import Server
from tandem.operator.settings import OperatorSettings, usual_pod_host


def ask(server: Server, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{host}:{server.port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_both_families_reach_it(host: str):
    """The kubelet asks at the pod's address, whichever that is."""
    server = Server(0, OperatorMetrics([]), alive=lambda: None, ready=lambda: None)
    server.start()
    try:
        assert ask(server, "/livez", host) == (200, "ok\n")
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("environment", "host"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "0.0.0.0"),
        ({"KUBERNETES_SERVICE_HOST": "fd00:10:96::1"}, "::"),
        ({}, "0.0.0.0"),
    ],
)
def test_pods_listen_on_the_clusters_family(environment: dict[str, str], host: str):
    """Where their addresses are IPv6 ones, that is where the kubelet and routers come to."""
    assert usual_pod_host(environment) == host
    settings = OperatorSettings(pod_host=usual_pod_host(environment))
    given = structs.replace(facts(), settings=settings)
    flags = {"--host": 3, "--kv-control-host": 2}
    found = [
        container["args"][at + 1]
        for role in Role
        for container in rendered(given, role)["spec"]["containers"]
        for at, word in enumerate(container["args"])
        if word in flags
    ]
    assert found == [host] * sum(flags.values())


def test_probes_say_what_is_wrong():
    """A probe answers 503 with the reason, and the metrics are the operator's own."""
    problems: list[str | None] = [None]
    metrics = OperatorMetrics(["Role"])
    metrics.errors.labels("500").inc()
    server = Server(0, metrics, alive=lambda: problems[0], ready=lambda: None)
    server.start()
    try:
        assert ask(server, "/livez") == (200, "ok\n")
        problems[0] = "the last good list is 200 s old"
        assert ask(server, "/livez") == (503, "the last good list is 200 s old\n")
        assert ask(server, "/readyz")[0] == 200
        assert (
            'tandem_operator:reconcile_errors_total{status="500"} 1.0' in ask(server, "/metrics")[1]
        )
        nothing_yet = (
            'reconcile_errors_total{status="403"}',
            'lists_total{outcome="error"}',
            'repairs_total{kind="Role"}',
        )
        for series in nothing_yet:  # of one that begins at 1 no increase would be seen
            assert f"tandem_operator:{series} 0.0" in ask(server, "/metrics")[1]
        assert "tandem_operator:services -1.0" in ask(server, "/metrics")[1]  # none was listed yet
        assert ask(server, "/nothing")[0] == 404
    finally:
        server.stop()


def test_a_taken_port_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch):
    """The port is named; nobody asks the DNS for a name on the way."""

    def ask_dns(*_: object) -> str:
        raise AssertionError("the DNS was asked")

    monkeypatch.setattr(socket, "getfqdn", ask_dns)
    server = Server(0, OperatorMetrics(), alive=lambda: None, ready=lambda: None)
    server.start()
    try:
        with pytest.raises(OSError, match=f"cannot listen on port {server.port}"):
            Server(server.port, OperatorMetrics(), alive=lambda: None, ready=lambda: None)
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("tandem.cli.serve.operator, tandem.operator.run", ("torch", "starlette", "tandem.hub")),
        ("tandem.operator.api.crd", ("kopf", "kubernetes", "aiohttp")),
        ("tandem.operator.desired.compose", ("kopf", "kubernetes", "aiohttp")),
    ],
)
def test_the_operators_image_stays_small(module: str, absent: tuple[str, ...]):
    """The process loads no engine, and types and builders load no client."""
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
