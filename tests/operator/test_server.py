"""Probes and metrics of the operator, and what its processes import."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from tandem.operator.metrics import OperatorMetrics
from tandem.operator.server import Server


def ask(server: Server, path: str) -> tuple[int, str]:
    """Status and body."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


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
        ("tandem.cli.operator, tandem.operator.run", ("torch", "fastapi", "tandem.hub")),
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
